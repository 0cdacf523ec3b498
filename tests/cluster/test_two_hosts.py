"""A run over two machines: one of them is cut off, the other names it, and the run goes on once both are there."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
from command_process import CommandProcess
from drawn_images import draw_tree
from interrupted_run import DEADLINE, EVERY_STEP, RECIPE, require_equal, steps_logged
from two_hosts import DEVICE, Host, on_host

from unigrad_fast.runtime import process_group
from unigrad_fast.training.trainer import Trainer

STEPS = 4
HELD_AT = 2  # steps done
TIMEOUT = timedelta(seconds=3)
PORT = 29500
SILENT = "no longer answers"


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    draw_tree(folder / "train", per_class=24)
    (folder / "recipe.yaml").write_text(RECIPE.format(batch=24, epochs=STEPS // 2))
    return folder


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """While inside, a rank stands still after some steps, says so by a file, and goes on when it sees another.

    From then on it waits for others no longer than TIMEOUT, which `engine.timeout` would make the start do too.
    """

    def step(trainer: Trainer, number: int, batches: Iterator) -> float:
        if number == HELD_AT:
            (folder / f"held-{trainer.world.rank}").touch()
            while not (folder / "go").exists():
                time.sleep(0.005)
            process_group.limit(TIMEOUT)
        return original(trainer, number, batches)

    original = Trainer.step
    with mock.patch.object(Trainer, "step", step):
        yield


def start(hosts: tuple[Host, Host], data: Path, output: Path, inside: tuple = ()) -> list:
    """A rank on each machine, as a launcher of any kind starts them."""
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": hosts[0].address}
    shared |= {"MASTER_PORT": str(PORT), "GLOO_SOCKET_IFNAME": DEVICE}
    given = ("--recipe", data / "recipe.yaml", "--data.train", data / "train", "--output", output, *EVERY_STEP)
    return [
        CommandProcess(
            "pretrain",
            *given,
            environment={**shared, "RANK": str(rank)},
            is_thin=True,
            inside=[partial(on_host, host.pid), *inside],
        )
        for rank, host in enumerate(hosts)
    ]


def ended(processes: list[CommandProcess]) -> tuple[list[int], list[str]]:
    results = [process.end(DEADLINE) for process in processes]
    return [result.returncode for result in results], [result.stdout + result.stderr for result in results]


@pytest.mark.slow  # 22 seconds on an idle machine
def test_a_run_whose_other_machine_is_cut_off_names_it_and_goes_on_with_it_as_if_nothing_had_been(
    hosts, data, tmp_path
):
    undisturbed, output = tmp_path / "undisturbed", tmp_path / "run"
    statuses, said = ended(start(hosts, data, undisturbed))
    assert statuses == [0, 0], said

    ranks = start(hosts, data, output, inside=(partial(held, tmp_path),))
    while len(list(tmp_path.glob("held-*"))) < 2:
        assert not any(rank.has_ended() for rank in ranks), [rank.end() for rank in ranks]
        time.sleep(0.005)
    hosts[1].cut_off()
    try:
        (tmp_path / "go").touch()
        statuses, said = ended(ranks)
    finally:
        hosts[1].come_back()
    assert statuses == [3, 3], said
    assert f"stopped: rank 1 on node2 {SILENT}, last heard from at " in said[0], said
    assert f"stopped: rank 0 on node1 {SILENT}" in said[1], said
    assert not any("Traceback" in text for text in said), said
    assert steps_logged(output) == HELD_AT

    statuses, said = ended(start(hosts, data, output))
    assert statuses == [0, 0] and "resuming after step" in said[0], said
    require_equal(output, undisturbed, STEPS)
