"""Too little memory: one message that names what was being made, its size, and the keys that make it less."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import numpy as np
import pytest
import torch
from drawn_images import draw_tree
from forked import start
from thin import thin

from unigrad_fast import cli
from unigrad_fast.evaluation.knn_probe import KNNProbe
from unigrad_fast.runtime import processors
from unigrad_fast.runtime.errors import DataError, RunStopped, UserError
from unigrad_fast.runtime.out_of_memory import is_out_of_memory, memory_for
from unigrad_fast.training.trainer import Trainer

RECIPE = """
recipe: cifar_subset
data: {batch_size: 16, image_size: 16, threads: 1}
model: {projector: {depth: 1, width: %d}}
schedule: {epochs: 2}
evaluation: {every: 0}
telemetry: {tensorboard: false}
"""


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("images")
    draw_tree(root / "train", per_class=24)
    return root / "train"


def arguments(images: Path, folder: Path, width: int) -> list[str]:
    (folder / "recipe.yaml").write_text(RECIPE % width)
    given = ["--recipe", folder / "recipe.yaml", "--data.train", images, "--output", folder / "run"]
    return ["pretrain", *map(str, given)]


def run_with_little(said: str, words: list[str], more: int) -> None:
    """A run that may have some bytes more than it has already."""
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT), 2)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    with thin():
        os._exit(cli.main(words))


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA takes addresses for all of its memory")
def test_memory_that_ends_while_a_run_is_built_names_the_part(images, tmp_path):
    said = tmp_path / "stderr"
    process = start(run_with_little, str(said), arguments(images, tmp_path, 24_576), 3 << 29)
    process.join(300)
    lines = [line for line in said.read_text().splitlines() if line.startswith("error: ")]
    assert process.exitcode == 2, said.read_text()
    assert lines == [
        "error: out of memory while making F, [24576, 24576], which takes about 2.25 GiB; 2.25 GiB more could not be "
        "allocated; on several ranks objective.placement sharded, or a smaller model.projector.width needs less"
    ]
    assert "Traceback" not in said.read_text() and not (tmp_path / "run").exists()


@pytest.mark.parametrize(("step", "status"), [(0, 2), (2, 3)])
def test_memory_that_ends_in_a_step_says_what_is_kept(images, tmp_path, capsys, monkeypatch, step, status):
    whole = Trainer.step

    def fail(self: Trainer, number: int, batches) -> float:
        if number == step:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total ...")
        return whole(self, number, batches)

    monkeypatch.setattr(Trainer, "step", fail)
    monkeypatch.setattr(processors, "crowded", lambda uses, remedy: "too many threads")
    with thin():
        assert cli.main(arguments(images, tmp_path, 32)) == status
    shown = capsys.readouterr()
    assert "WARNING: too many threads" in shown.out
    (line,) = shown.err.splitlines()
    assert f"out of memory while making step {step + 1}, with 16 images at once on each rank; 1.5 GiB more " in line
    assert "data.batch_size" in line and "engine.accumulation_steps" in line
    assert line.endswith("there is no checkpoint yet") == (status == 3)


def test_memory_that_ends_in_a_step_asks_the_planner(images, tmp_path, capsys, monkeypatch):
    whole = Trainer.step

    def fail(self: Trainer, number: int, batches) -> float:
        if number == 2:  # the planner walks two steps
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total ...")
        return whole(self, number, batches)

    monkeypatch.setattr(Trainer, "step", fail)
    with thin():
        assert cli.main([*arguments(images, tmp_path, 32), "--data.image_size", "64"]) == 3
    shown = capsys.readouterr()
    assert "plan: counted for a GPU, peak memory of a rank: " in shown.out
    assert "plan: expected to fit: engine.accumulation_steps 2 (" in shown.out and "; data.batch_size " in shown.out
    assert "out of memory while making step 3" in shown.err


def test_memory_that_ends_in_an_evaluation_names_its_keys(images, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(KNNProbe, "__call__", lambda *_: np.empty(1 << 50))
    with thin():
        assert cli.main([*arguments(images, tmp_path, 32), "--data.val", str(images)]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "the features of " in line and "evaluation.batch_size" in line and " TiB more could not be allocated" in line


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("CUDA error: out of memory"),
    ],
)
def test_every_library_is_understood(error):
    assert is_out_of_memory(error)
    with pytest.raises(RunStopped) as raised, memory_for("it", lambda: 2048, "less", RunStopped, "kept"):
        raise error
    assert str(raised.value) == "out of memory while making it, which takes about 2 KiB; less; kept"
    assert cli.explained(error)[0] == 3


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), UserError("out of memory"), DataError("bad_alloc")])
def test_other_errors_stay_what_they_are(error):
    assert not is_out_of_memory(error)
    with pytest.raises(type(error), match=str(error)), memory_for("it", None, "less"):
        raise error
