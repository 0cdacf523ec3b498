"""When a rank stops, dies, hangs or fails, the others end within their time-out and name it with its machine."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from dataclasses import replace
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from command_process import free_port
from forked import start
from worker_group import WorkerGroup

from unigrad_fast.config import Config, Engine
from unigrad_fast.runtime import process_group
from unigrad_fast.runtime.attendance import attended
from unigrad_fast.runtime.errors import RankLost
from unigrad_fast.runtime.process_group import World
from unigrad_fast.training.engine import build_engine
from unigrad_fast.training.optimizers import build_optimizer

HERE = socket.gethostname()
TIMEOUT = timedelta(seconds=3)
AT_STAGE = 3
UNSEEN = "stops, and no collective raises an error"
KILLED_UNSEEN = "is killed, and no collective raises an error"
LISTS = "lists images for long, and no collective raises an error"
WITHOUT_ERRORS = (UNSEEN, KILLED_UNSEEN, LISTS)


def misbehave(how: str) -> None:
    if how.startswith("stops"):
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how.startswith("is killed"):
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "hangs":
        time.sleep(600)
    elif how == "fails":
        raise ValueError("its own\nfault")


def as_if_on_gpus(world: World, how: str) -> World:
    """There no collective raises an error, and the thread that watches has to end the process."""
    return replace(world, device=torch.device("cuda")) if how in WITHOUT_ERRORS else world


def rank_of_three(values: dict[str, str], who: int, how: str, group: bool, said: str) -> None:
    """Works through stages with a collective each, in a group that a library has made or in that of all."""
    os.environ.update(values)
    sys.stderr = open(said, "w")  # noqa: SIM115
    try:
        with process_group.session("cpu") as world, attended(as_if_on_gpus(world, how), TIMEOUT) as at:
            theirs = dist.new_group(range(world.size)) if group else None
            process_group.limit(timedelta(hours=1) if how in WITHOUT_ERRORS else TIMEOUT)
            if how == LISTS:
                time.sleep(1.5 * TIMEOUT.total_seconds() if world.rank == who else 0)
                dist.barrier()
            for stage in range(2 * AT_STAGE):
                at(f"stage {stage}")
                if stage == AT_STAGE and world.rank == who:
                    misbehave(how)
                if how == KILLED_UNSEEN and stage == AT_STAGE:
                    time.sleep(600)  # as in a library that waits for the GPU
                dist.all_reduce(torch.ones(2), group=theirs)
    except RankLost as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(3)
    except ValueError:
        os._exit(1)
    os._exit(0)


def begin(folder: Path, who: int, how: str, group: bool = False) -> tuple[list[BaseProcess], list[Path]]:
    """The processes of three ranks, and the files that hold what they say."""
    folder.mkdir()
    shared = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    files = [folder / f"rank-{rank}" for rank in range(3)]
    ranks = [
        start(rank_of_three, {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}, who, how, group, str(file))
        for rank, file in enumerate(files)
    ]
    return ranks, files


CASES = {
    (1, "stops"): "no longer answers, last heard from at ",
    (1, "is killed"): "no longer answers, last heard from at ",
    (2, "hangs"): "is still at stage 3, and the others wait for it",
    (1, "fails"): "exited at stage 3: ValueError: its own fault",
    (0, "stops"): "no longer answers",
    (0, "is killed"): "no longer answers",
    (1, "stops", True): "no longer answers, last heard from at ",
    (1, UNSEEN): "no longer answers, last heard from at ",
    (0, KILLED_UNSEEN): "no longer answers",
    (0, LISTS): "",
    (1, "works"): "",
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory) -> dict[tuple, tuple[list[int], list[str]]]:
    """Exit statuses of the other ranks and what they said, by case. All cases at once: most of it is waiting."""
    folder, results = tmp_path_factory.mktemp("ranks"), {}
    begun = {case: begin(folder / str(number), *case) for number, case in enumerate(CASES)}
    for case, (ranks, files) in begun.items():
        others = [rank for rank in range(3) if rank != case[0]]
        for rank in others:
            ranks[rank].join(120)
        results[case] = [ranks[rank].exitcode for rank in others], [files[rank].read_text() for rank in others]
        ranks[case[0]].kill()
        ranks[case[0]].join()
    return results


@pytest.mark.parametrize("case", [case for case, said in CASES.items() if said], ids=str)
def test_who_is_awaited_in_vain_is_named_with_its_machine_by_all_others(case, ended):
    statuses, said = ended[case]
    assert statuses == [3, 3], said
    for text in said:
        assert text.removeprefix("stopped: ").startswith(f"rank {case[0]} on {HERE} {CASES[case]}"), said
        assert text.endswith("; the same command resumes from the newest checkpoint\n")


def test_ranks_that_do_their_work_end_without_a_word(ended):
    assert ended[1, "works"] == ([0, 0], ["", ""])


def test_before_the_first_stage_ranks_wait_longer_for_one_that_lists_images(ended):
    assert ended[0, LISTS] == ([0, 0], ["", ""])


def time_outs_of_an_engine() -> tuple[list[list[float]], int]:
    """Seconds that each group allows: at first, while patient, and once DeepSpeed has made its own."""

    def allowed() -> list[float]:
        groups = list(dist.distributed_c10d._world.pg_map)
        return sorted({each._get_backend(torch.device("cpu")).options._timeout.total_seconds() for each in groups})

    found = []
    process_group.limit(timedelta(minutes=2))
    found.append(allowed())
    with process_group.patient(timedelta(minutes=2)):
        found.append(allowed())
    encoder = torch.nn.Linear(3, 2)
    optimizer = build_optimizer(encoder, Config().optimizer)
    before = len(dist.distributed_c10d._world.pg_map)
    build_engine(encoder, optimizer, settings=Engine(timeout=3), micro_batch_size=2, dtype=None)
    found.append(allowed())
    process_group.limit(timedelta(minutes=1))
    return found, len(dist.distributed_c10d._world.pg_map) - before


def test_collectives_of_training_have_their_time_out_in_deepspeeds_groups_too_and_listing_a_long_one():
    group = WorkerGroup(1)
    try:
        ((found, made),) = group.run(time_outs_of_an_engine)
    finally:
        group.close()
    assert found == [[120.0], [3600.0], [180.0]] and made > 0
