"""`unigrad-fast doctor`: what it finds, what it tries, and what it says is missing."""

import importlib.metadata
import os
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from command_process import command_on_two_ranks

from unigrad_fast import cli
from unigrad_fast.doctor import machine, packages
from unigrad_fast.doctor.parts import PARTS, TriedPart, check_finite
from unigrad_fast.runtime import nvidia

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def quick_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that do nothing, where a test is about something else."""
    for name, part in PARTS.items():
        monkeypatch.setitem(PARTS, name, part._replace(build=lambda scene: lambda: None))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Beside other busy processes two threads, which wait for each other, take many times as long as one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def examine(capsys: pytest.CaptureFixture, *arguments: str) -> tuple[int, dict[str, str], list[str]]:
    """Exit status, rows of the tables by their first cell, each as one line of words, and lines on stderr."""
    status = cli.main(["doctor", *arguments])
    printed = capsys.readouterr()
    rows, name = {}, ""
    for line in printed.out.splitlines():
        cells = [cell.strip() for cell in re.split("[│┃]", line)[1:-1]]
        if cells:
            name = cells[0] or name
            rows[name] = " ".join([rows.get(name, ""), *cells[1:]]).strip()
    return status, rows, printed.err.splitlines()


@pytest.mark.long
def test_all_is_found_and_every_part_works(one_thread, capsys):
    status, rows, errors = examine(capsys)
    assert (status, errors) == (0, [])
    for name in ("Python", "torch", "torchvision", "DeepSpeed", "DALI", "Triton", "CPU", "memory", "disk"):
        assert "ok" in rows[name].split(), name
    for name in ("device", "ranks", "process group", "precision", "decoder", "kernels", "batch norm", "ZeRO stages"):
        assert rows[name], name
    for name in PARTS:
        assert re.search(r"[\d,]+\.\d [\d,]+\.\d ok$", rows[name]), name


def test_nothing_is_tried_without_the_smoke(capsys):
    status, rows, _ = examine(capsys, "--smoke", "false")
    assert status == 0
    assert not rows.keys() & (PARTS.keys() - {"batch norm"})


@pytest.mark.parametrize(
    ("module", "name", "command", "untried"),
    [
        ("nvidia.dali", "DALI", "pip install 'nvidia-dali-cuda1[23]0>=2.0,<3'", {"decode, augment", "training step"}),
        ("deepspeed", "DeepSpeed", "pip install deepspeed==0.19.8", {"training step"}),
    ],
)
def test_missing_package_is_named_with_its_command_and_the_rest_is_tried(
    module, name, command, untried, quick_parts, capsys, monkeypatch
):
    monkeypatch.setitem(sys.modules, module, None)
    status, rows, errors = examine(capsys)
    assert status == 2
    assert rows[name].startswith("not installed missing")
    assert re.fullmatch(f"error: {name}: not installed; {command}", errors[-1])
    assert {part for part in PARTS if "skipped" in rows[part]} == untried


def test_missing_torch_is_said_without_a_traceback(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    status, rows, errors = examine(capsys)
    assert status == 2
    assert "error: torch: not installed; pip install 'torch>=2.11,<2.15'" in errors
    assert "device" not in rows


def test_package_whose_import_fails_is_shown_with_the_reason(quick_parts, capsys, monkeypatch):
    def broken(name: str):
        if name == "nvidia.dali":
            raise ImportError("libcuda.so.1: cannot open shared object file\nsecond line")
        return import_module(name)

    import_module = packages.importlib.import_module
    monkeypatch.setattr(packages.importlib, "import_module", broken)
    status, _, errors = examine(capsys)
    assert status == 2
    assert "its import fails: libcuda.so.1: cannot open shared object file; install NVIDIA's driver" in errors[-1]


@pytest.mark.parametrize(
    ("driver", "cuda", "visible", "status", "words"),
    [
        (None, "13.0", None, "ok", "none"),
        ("550.54.15", "13.0", None, "wrong", "the NVIDIA driver on your system is too old"),
        ("580.82.07", None, None, "wrong", "built for the CPU only"),
        ("580.82.07", "13.0", "", "note", "hidden by CUDA_VISIBLE_DEVICES"),
    ],
)
def test_gpu_that_cannot_be_used_is_explained(driver, cuda, visible, status, words, monkeypatch):
    def unavailable() -> bool:
        warnings.warn(f"{words} (found version 12040). (Triggered internally at x.cpp:1)", stacklevel=1)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", unavailable)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(nvidia, "driver_version", lambda: driver)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    (finding,) = machine.gpus()
    assert finding.status == status
    assert words in finding.found
    assert "Triggered" not in finding.found


def test_gpus_of_a_kind_share_a_row(monkeypatch):
    card = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=85 * 10**9, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: card)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 30, 7))
    monkeypatch.setattr(nvidia, "driver_version", lambda: "580.82.07")
    assert [each.found for each in machine.gpus()] == [
        "8 x NVIDIA H100 80GB HBM3, 79.2 GiB, compute capability 9.0",
        "driver 580.82.07, NCCL 2.30.7",
    ]


def test_low_limits_and_a_busy_machine_are_noted_and_not_refused(quick_parts, capsys, monkeypatch):
    monkeypatch.setattr(machine.resource, "getrlimit", lambda limit: (256, 4096))
    monkeypatch.setattr(os, "getloadavg", lambda: (1000.0, 0.0, 0.0))
    status, rows, errors = examine(capsys)
    assert (status, errors) == (0, [])
    assert "note" in rows["open files"].split()
    assert "note" in rows["load"].split()


def test_other_version_of_deepspeed_is_refused(quick_parts, capsys, monkeypatch):
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.19.7" if name == "deepspeed" else version(name))
    status, _, errors = examine(capsys)
    assert status == 2
    assert errors == ["error: DeepSpeed: 0.19.7, but ==0.19.8 is required; pip install deepspeed==0.19.8"]


@pytest.mark.parametrize("home", [None, "runtime"])
def test_a_gpu_without_nvcc_is_no_problem_and_that_is_said(home, tmp_path, monkeypatch):
    from torch.utils import cpp_extension

    home = home and tmp_path / home
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", home and str(home))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    package = next(each for each in packages.PACKAGES if each[0] == "DeepSpeed")
    row = packages._package(*package)
    assert row.status == "ok" and "without nvcc" in row.found
    if home is not None:
        (home / "bin").mkdir(parents=True)
        (home / "bin/nvcc").touch()
        assert "nvcc" not in packages._package(*package).found


def test_an_unknown_choice_of_kernels_is_shown_with_the_remedy(quick_parts, capsys, monkeypatch):
    monkeypatch.setenv("UNIGRAD_KERNELS", "cuda")
    status, rows, errors = examine(capsys)
    assert status == 2 and "broken" in rows["kernels"]
    assert "error: kernels: UNIGRAD_KERNELS=cuda is unknown; use triton or torch, or unset it" in errors


def test_failing_part_is_shown_with_its_reason_and_the_others_are_tried(quick_parts, capsys, monkeypatch):
    def fail(scene):
        raise RuntimeError("no kernel image [sm_52]\nand more")

    monkeypatch.setitem(PARTS, "objective", TriedPart(fail, set(), "take another GPU"))
    status, rows, errors = examine(capsys)
    assert status == 2
    assert errors == ["error: objective: RuntimeError: no kernel image [sm_52]; take another GPU"]
    assert "failed" in rows["objective"]
    assert all(rows[name].endswith("ok") for name in PARTS.keys() - {"objective"})


def test_result_that_is_not_finite_fails(quick_parts, capsys, monkeypatch):
    numbers = torch.tensor([1.0, torch.nan])
    monkeypatch.setitem(PARTS, "model forward", TriedPart(lambda scene: lambda: check_finite(numbers), set(), "why"))
    assert examine(capsys)[2] == ["error: model forward: RuntimeError: the result is not finite; why"]


def test_contradictory_launcher_variables_are_refused(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    assert examine(capsys)[2][0].startswith("error: WORLD_SIZE is not set")


def test_requirements_are_those_of_the_installation():
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    for requirement in (*(requirement for *_, requirement in packages.PACKAGES), *packages.DALI.values()):
        assert f'"{requirement}"' in setup


@pytest.mark.parametrize(
    ("version", "fits"),
    [("2.11", True), ("2.14.1+cu130", True), ("2.10.2", False), ("2.15.0.dev2026", False), ("2.9", False)],
)
def test_versions_are_compared_by_their_numbers(version, fits):
    assert packages.fits(version, "torch>=2.11,<2.15") is fits


def test_ranks_try_the_parts_together_and_only_the_first_prints():
    result = command_on_two_ranks("doctor")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("Machine and versions") == result.stdout.count("Ready: ") == 1
    assert "2 ranks, 2 on this machine; launched by torchrun" in result.stdout
    assert "failed" not in result.stdout
