"""A run keeps the number of compute threads with which it began, whatever else the machine does when it resumes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
import yaml
from thin import thin

from unigrad_fast import cli
from unigrad_fast.runtime import processors
from unigrad_fast.runtime.errors import RunStopped
from unigrad_fast.training.trainer import Trainer

RECIPE = """
recipe: cifar_subset
data: {batch_size: 32, image_size: 16, threads: 1}
model: {projector: {depth: 1, width: 16}}
schedule: {epochs: 2}
evaluation: {every: 0}
telemetry: {tensorboard: false}
"""


def test_a_run_resumes_with_the_threads_that_it_chose(images, tmp_path, capsys, monkeypatch):
    def pretrain(*more: str, others: float) -> tuple[int, str]:
        """Status and output, on two cores of which other programs use so many."""
        as_it_is = processors.Watch.use
        with monkeypatch.context() as patch, thin(0):
            seen = {"place": ("node", (0, 1)), "quota": None, "own": 1.0, "busy": 1.0 + others}
            patch.setattr(processors.Watch, "use", lambda self: replace(as_it_is(self), **seen))
            status = cli.main(["pretrain", *words, *more])
        return status, capsys.readouterr().out

    def fail_in_the_second_epoch(self: Trainer, number: int, batches) -> float:
        if number == 3:
            raise RunStopped("an interruption")
        threads.append(torch.get_num_threads())
        return step(self, number, batches)

    def threads_of_run() -> int:
        return yaml.safe_load(Path(tmp_path, "run/config.yaml").read_text())["engine"]["threads"]

    for name in processors.CHOSEN_BY:
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    words = ["--recipe", str(tmp_path / "recipe.yaml"), "--data.train", str(images), "--output", str(tmp_path / "run")]
    threads: list[int] = []
    step, before = Trainer.step, torch.get_num_threads()
    monkeypatch.setattr(Trainer, "step", fail_in_the_second_epoch)
    torch.set_num_threads(2)
    try:
        status, said = pretrain(others=1.0)
        assert (status, threads, threads_of_run()) == (3, [1, 1, 1], 1)
        line = "computing with 1 thread: other programs use about 1.0 of 2 cores; set engine.threads to change it"
        assert said.count("computing with") == said.count(line) == 1
        _, said = pretrain(others=0.0)
        assert "computing with 1 thread, as this run began; 2 cores can be used: engine.threads 2 may be faster" in said
        monkeypatch.setattr(Trainer, "step", step)
        status, said = pretrain("--engine.threads", "2", others=0.0)
        assert "computing with 2 threads; this run began with 1, so its numbers change by rounding" in said
        assert (status, threads_of_run()) == (0, 2)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
