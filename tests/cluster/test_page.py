"""docs/scale.md, typed as it stands there on two machines; what differs from site to site is put in."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from drawn_images import draw_tree
from forked import ENVIRONMENT, ROOT
from interrupted_run import RECIPE, require_equal, steps_logged
from two_hosts import DEVICE, Host

PAGE = (ROOT / "docs/scale.md").read_text(encoding="utf-8")
STEPS = 40
SEEN = 12  # steps, when a machine is cut off
DEADLINE = 600.0  # seconds that any wait may take
PLAN, DOCTOR, DOCTOR_OF_ALL = (
    "unigrad-fast plan",
    "unigrad-fast doctor",
    "torchrun --nproc_per_node 8 -m unigrad_fast doctor",
)
ONE, DEVICES, MANY = "torchrun --nproc_per_node 8 --max-restarts", "export GLOO_SOCKET_IFNAME=", "torchrun --nnodes 4"
FOLLOWED = (PLAN, DOCTOR, DOCTOR_OF_ALL, ONE, DEVICES, MANY)
NOT_FOLLOWED = {
    "stopped: ": "a message",
    "still, or ": "the rest of it",
    "torchrun --nproc_per_node 8 --numa-binding": "wants numactl and GPUs",
}


def lines(page: str) -> list[str]:
    """What is indented, with continued lines joined."""
    return "\n".join(re.findall(r"(?m)^    (.*)$", page)).replace("\\\n", " ").splitlines()


def command(begins: str) -> str:
    """The one of the page that begins so."""
    (found,) = (line for line in lines(PAGE) if line.startswith(begins))
    return found


def put_in(command: str, values: Mapping[str, object]) -> str:
    """The command with a site's own values in place of the page's, each of which must be there."""
    for theirs, ours in values.items():
        assert theirs in command, f"{theirs!r} is not in {command!r}"
        command = command.replace(theirs, str(ours))
    return command


def test_every_command_of_the_page_is_followed_below_or_named_as_one_that_is_not():
    for line in lines(PAGE):
        assert sum(line.startswith(begins) for begins in (*FOLLOWED, *NOT_FOLLOWED)) == 1, line
    assert all(command(begins) for begins in FOLLOWED)


def test_the_device_of_the_page_is_that_of_the_machines():
    assert command(DEVICES) == f"export GLOO_SOCKET_IFNAME={DEVICE} NCCL_SOCKET_IFNAME={DEVICE}"


@pytest.fixture
def site(tmp_path) -> dict[str, object]:
    """Images and a small recipe in place of the page's."""
    draw_tree(tmp_path / "train", per_class=48)
    draw_tree(tmp_path / "val", per_class=6)
    text = RECIPE.format(batch=24, epochs=STEPS // 4).replace("every: 99", "every: 2.5")
    text = text.replace("precision: fp32", "precision: fp32, device: cpu, timeout: 0.25")
    (tmp_path / "recipe.yaml").write_text(text)
    return {"/data/imagenet/train": tmp_path / "train", "/data/imagenet/val": tmp_path / "val"}


class Typed:
    """A command that is typed on a machine, in a folder that all machines share."""

    def __init__(self, host: Host, folder: Path, command: str, **variables: str):
        self.host, self.file = host, folder / f"{host.name}-{len(list(folder.glob(f'{host.name}-*')))}.txt"
        paths = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
        with open(self.file, "w") as file:
            self.process = subprocess.Popen(
                host.command(folder, "bash", "-ec", command),
                env={**os.environ, **ENVIRONMENT, **paths, **variables},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    @property
    def said(self) -> str:
        return self.file.read_text()

    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def end(self) -> int:
        return self.process.wait(DEADLINE)


def wait_until(happened, typed: list[Typed]) -> None:
    end = time.monotonic() + DEADLINE
    while not happened():
        assert not any(each.has_ended() for each in typed) and time.monotonic() < end, [each.said for each in typed]
        time.sleep(0.02)


@pytest.mark.slow
def test_the_page_is_followed_on_two_machines_of_which_one_is_cut_off(hosts, site, tmp_path):
    one, many = tmp_path / "one", tmp_path / "many"
    one.mkdir(), many.mkdir()
    output, first = many / "runs/imagenet", hosts[0]
    here = {"unigrad-fast": "python -m unigrad_fast"}  # the checkout, not what is installed
    two = {"--nproc_per_node 8": "--nproc_per_node 2"}
    recipe = f"--recipe {tmp_path / 'recipe.yaml'}"

    for words in (
        put_in(command(DOCTOR), here),
        put_in(command(DOCTOR_OF_ALL), two),
        put_in(command(PLAN), here),
        put_in(command(ONE), {**two, **site, "--recipe imagenet_100ep": recipe}),
    ):
        typed = Typed(first, one, words)
        assert typed.end() == 0, typed.said

    on_many = {"--nnodes 4": "--nnodes 2", "--nproc_per_node 8": "--nproc_per_node 1"}
    many_nodes = put_in(command(MANY), {**on_many, **site, "--recipe imagenet_800ep_cutmix_multicrop": recipe})

    def on_both(words: str) -> list[Typed]:
        words = f"{command(DEVICES)}\n{words}"
        return [Typed(host, many, words, HOST=first.name, NODE=str(number)) for number, host in enumerate(hosts)]

    nodes = on_both(many_nodes)
    wait_until(lambda: steps_logged(output) >= SEEN, nodes)
    hosts[1].cut_off()
    try:
        assert nodes[0].end() == 1, nodes[0].said
        wait_until(lambda: "stopped: " in nodes[1].said, nodes[1:])
    finally:
        hosts[1].come_back()
    assert nodes[1].end() == 1, nodes[1].said
    assert "stopped: rank 1 on node2 no longer answers, last heard from at step" in nodes[0].said
    assert "stopped: torchrun on node1, where rank 0 is, no longer answers: " in nodes[1].said
    assert SEEN <= steps_logged(output) < STEPS and not (output / "stopped.txt").exists()

    nodes = on_both(many_nodes)
    assert [node.end() for node in nodes] == [0, 0], [node.said for node in nodes]
    assert "resuming after step" in nodes[0].said
    require_equal(output, one / "runs/imagenet", STEPS)

    by_number = "--node-rank $NODE --master-addr $HOST"
    assert f"`{by_number}`" in PAGE
    nodes = on_both(put_in(many_nodes, {"--rdzv-backend c10d --rdzv-endpoint $HOST:29400": by_number}))
    assert [node.end() for node in nodes] == [0, 0], [node.said for node in nodes]
    assert "this run is complete; there is nothing left to do" in nodes[0].said
