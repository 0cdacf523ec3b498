"""Ranks agree on what they compute on, before they join; who cannot take part is named, on all ranks."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from command_process import free_port
from forked import start

from unigrad_fast.runtime import devices, nvidia, process_group
from unigrad_fast.runtime.devices import Choice
from unigrad_fast.runtime.errors import UserError
from unigrad_fast.runtime.nvidia import GPUs

TOO_OLD = GPUs(0, "470.57", problem="driver 470.57, but: the NVIDIA driver is too old", remedy="install driver 580")


def told_to(choices: list[Choice]) -> list[str | list[Choice]]:
    """What each rank is told once all have said what they compute on: who does what, or why they end."""
    store = dist.HashStore()

    def ask(rank: int) -> str | list[Choice]:
        try:
            return devices.agree(store, rank, len(choices), choices[rank])
        except UserError as error:
            return str(error)

    with ThreadPoolExecutor(len(choices)) as pool:
        return list(pool.map(ask, range(len(choices))))


def choice(monkeypatch: pytest.MonkeyPatch, found: GPUs, device: str = "auto", **launch) -> Choice:
    monkeypatch.setattr(nvidia, "find", lambda: found)
    monkeypatch.setattr(devices.socket, "gethostname", lambda: "gpu03")
    return devices.choose(device, **{"local_rank": 0, "local_size": 1, "own_card": False, **launch})


def test_ranks_of_one_kind_know_each_other():
    ranks = [Choice("a", "cuda", 0), Choice("a", "cuda", 1), Choice("b", "cuda", 0)]
    assert told_to(ranks) == [ranks] * 3
    assert [str(each.device) for each in ranks] == ["cuda:0", "cuda:1", "cuda:0"]


def test_a_mixture_is_refused_with_the_names_of_the_machines_on_all_ranks():
    ranks = [Choice(host, "cuda", index) for host in ("gpu01", "gpu02") for index in (0, 1)]
    ranks += [Choice("gpu03", "cpu", reason="torch sees no GPU")] * 2
    (said,) = set(told_to(ranks))
    assert said == (
        "gpu01, gpu02 would compute on GPUs, gpu03 on the CPU: torch sees no GPU; use machines of one kind, "
        "or compute on the CPU with engine.device cpu"
    )


def test_a_card_that_torch_cannot_use_is_named_with_its_machine_on_all_ranks(monkeypatch):
    mine = choice(monkeypatch, TOO_OLD)
    said = "engine.device = auto: driver 470.57, but: the NVIDIA driver is too old; install driver 580; or compute on"
    assert mine.kind == "cpu" and mine.problem.startswith(said)
    others = [Choice("gpu01", "cuda", 0), mine, mine]
    assert set(told_to(others)) == {f"gpu03: {mine.problem}"}
    assert told_to([mine]) == [mine.problem]


@pytest.mark.parametrize(
    ("found", "device", "kind", "why"),
    [
        (GPUs(0, None), "auto", "cpu", "torch sees no GPU"),
        (GPUs(0, "580.82", hidden=True), "auto", "cpu", "CUDA_VISIBLE_DEVICES hides the GPUs"),
        (TOO_OLD, "cpu", "cpu", "engine.device is cpu there"),
        (GPUs(8, "580.82"), "cpu", "cpu", "engine.device is cpu there"),
        (GPUs(8, "580.82"), "auto", "cuda", ""),
    ],
)
def test_a_machine_without_a_card_computes_on_the_cpu_and_so_does_one_that_is_told_to(
    found, device, kind, why, monkeypatch
):
    mine = choice(monkeypatch, found, device)
    assert (mine.kind, mine.reason, mine.problem) == (kind, why, "")


@pytest.mark.parametrize("found", [GPUs(0, None), GPUs(0, "580.82", hidden=True), TOO_OLD])
def test_cuda_is_refused_where_there_is_none(found, monkeypatch):
    assert choice(monkeypatch, found, "cuda").problem.startswith("engine.device = cuda: ")


def test_ranks_take_a_card_each_and_more_ranks_than_cards_are_refused(monkeypatch):
    four = GPUs(4, "580.82")
    assert choice(monkeypatch, four, local_rank=3, local_size=5).index == 3
    said = "5 processes on this machine, but torch sees 4 GPUs; start 4 processes per machine"
    assert choice(monkeypatch, four, local_rank=4, local_size=5).problem == said
    assert choice(monkeypatch, GPUs(1, "580.82"), local_rank=4, local_size=5, own_card=True).index == 0


def test_a_driver_without_a_card_is_none(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(nvidia, "DRIVER", tmp_path)
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.82.07  Wed\n")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert nvidia.find().problem
    (tmp_path / "gpus").mkdir()
    assert nvidia.find() == GPUs(0, "580.82.07")


def begin(values: dict[str, str], said: str) -> None:
    """A rank that has no usable card if its number is 1, and one that works, as far as it is asked, if it is 0."""
    os.environ.update(values)
    sys.stderr = open(said, "w")  # noqa: SIM115
    nvidia.find = lambda: TOO_OLD if values["RANK"] == "1" else GPUs(2, "580.82")
    try:
        process_group.start("auto")
    except UserError as error:
        print(error, dist.is_initialized(), file=sys.stderr)
    sys.stderr.flush()
    os._exit(0)


def test_ranks_with_and_without_a_usable_card_end_before_they_join(tmp_path):
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    files = [tmp_path / f"rank-{rank}" for rank in range(2)]
    ranks = [
        start(begin, {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}, str(file))
        for rank, file in enumerate(files)
    ]
    for process in ranks:
        process.join(60)
    said = {file.read_text() for file in files}
    assert len(said) == 1 and "driver 470.57, but: the NVIDIA driver is too old" in said.pop()


def test_the_device_of_the_configuration_is_taken(monkeypatch):
    monkeypatch.setattr(nvidia, "find", lambda: TOO_OLD)
    monkeypatch.setenv("DS_ACCELERATOR", "cuda")
    with process_group.session("cpu") as world:
        assert world.device == torch.device("cpu") and os.environ["DS_ACCELERATOR"] == "cpu"
    with pytest.raises(UserError, match=r"engine\.device = auto: driver 470"):
        process_group.start("auto")
    assert not dist.is_initialized() and os.environ["DS_ACCELERATOR"] == "cuda"
