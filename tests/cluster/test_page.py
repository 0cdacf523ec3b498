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
from interrupted_run import DEADLINE, RECIPE, require_equal, steps_logged
from two_hosts import DEVICE, Host

PAGE = (ROOT / "docs/scale.md").read_text(encoding="utf-8")
STEPS = 40
SEEN = 12  # steps, when a machine is cut off
FOLLOWED = ("Before the job", "One node", "torchrun")
NOT_FOLLOWED = {
    "When a rank is lost": "a message; the end of a run below has it",
    "NUMA binding": "wants numactl and GPUs",
}


def blocks(page: str) -> dict[str, str]:
    """The indented lines of each section that has some, as a shell takes them."""
    found = {}
    for section in re.split(r"(?m)^##+ ", page)[1:]:
        heading, _, text = section.partition("\n")
        if lines := re.findall(r"(?m)^    (.*)$", text):
            found[heading] = "\n".join(lines).replace("\\\n", " ") + "\n"
    return found


def put_in(command: str, values: Mapping[str, object]) -> str:
    """The command with a site's own values in place of the page's, each of which must be there."""
    for theirs, ours in values.items():
        assert theirs in command, f"{theirs!r} is not in {command!r}"
        command = command.replace(theirs, str(ours))
    return command


def test_every_command_of_the_page_is_followed_below_or_named_as_one_that_is_not():
    assert blocks(PAGE).keys() == {*FOLLOWED, *NOT_FOLLOWED}


def test_the_device_of_the_page_is_that_of_the_machines():
    assert f"GLOO_SOCKET_IFNAME={DEVICE} " in blocks(PAGE)["torchrun"]


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
    page = blocks(PAGE)
    first = hosts[0]

    doctor = "".join(line for line in page["Before the job"].splitlines(keepends=True) if "doctor" in line)
    doctor = put_in(
        doctor, {"unigrad-fast doctor": "python -m unigrad_fast doctor", "--nproc_per_node 8": "--nproc_per_node 2"}
    )
    typed = Typed(first, one, doctor)
    assert typed.end() == 0, typed.said

    recipe = f"--recipe {tmp_path / 'recipe.yaml'}"
    on_one = {**site, "--nproc_per_node 8": "--nproc_per_node 2", "--recipe imagenet_100ep": recipe}
    typed = Typed(first, one, put_in(page["One node"], on_one))
    assert typed.end() == 0, typed.said

    on_many = {"--nnodes 4": "--nnodes 2", "--nproc_per_node 8": "--nproc_per_node 1"}
    on_many |= {**site, "--recipe imagenet_800ep_cutmix_multicrop": recipe}
    command, output = put_in(page["torchrun"], on_many), many / "runs/imagenet"
    nodes = [Typed(host, many, command, HOST=first.name) for host in hosts]
    wait_until(lambda: steps_logged(output) >= SEEN, nodes)
    hosts[1].cut_off()
    try:
        assert nodes[0].end() == 1, nodes[0].said
        wait_until(lambda: "stopped: " in nodes[1].said, nodes[1:])
    finally:
        hosts[1].come_back()
    assert nodes[1].end() == 1, nodes[1].said
    assert "stopped: rank 1 on node2 does not answer any more, last heard of at step" in nodes[0].said
    assert "stopped: torchrun on node1, where rank 0 is, does not answer any more: " in nodes[1].said
    assert SEEN <= steps_logged(output) < STEPS and not (output / "stopped.txt").exists()

    nodes = [Typed(host, many, command, HOST=first.name) for host in hosts]
    statuses = [node.end() for node in nodes]
    assert statuses == [0, 0], [node.said for node in nodes]
    assert "going on after step" in nodes[0].said
    require_equal(output, one / "runs/imagenet", STEPS)
