"""Which steps a run reports."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from drawn_images import draw_tree
from forked import start
from hypothesis import given
from hypothesis import strategies as st
from thin import thin

from unigrad_fast.config import resolve
from unigrad_fast.runtime.run_folder import RunFolder
from unigrad_fast.training.trainer import Trainer


def reported(total_steps: int, **telemetry: int) -> tuple[list[int], list[int]]:
    """The steps of a run that are reported, and those of them with an effective rank."""
    run = SimpleNamespace(config=resolve("quickstart", {"telemetry": telemetry}), total_steps=total_steps)
    due = {step + 1: Trainer.reports(run, step) for step in range(total_steps)}
    steps = [step for step, (is_due, _) in due.items() if is_due]
    return steps, [step for step in steps if due[step][1]]


@given(st.integers(1, 3000))
def test_a_run_has_fifty_rows_with_ranks_if_it_has_as_many_steps(total_steps):
    steps, ranked = reported(total_steps)
    assert len(ranked) >= min(50, total_steps)
    assert {1, total_steps} <= set(ranked)
    assert len(steps) <= max(150, total_steps // 10 + 2)


def test_a_long_run_reports_every_tenth_step_and_every_hundredth_rank():
    steps, ranked = reported(10_000)
    assert steps == [1, *range(10, 10_001, 10)]
    assert ranked == [1, *range(100, 10_001, 100)]


@pytest.mark.parametrize("every", [1, 7, 30])
def test_an_interval_that_the_user_gives_is_kept_in_a_short_run(every):
    steps, ranked = reported(60, every=every, effective_rank_every=30)
    assert steps == sorted({1, *range(every, 61, every), 60})
    assert ranked == sorted({1, 60} | {step for step in steps if step % 30 < every})


@pytest.mark.parametrize(("target", "has_momentum"), [("momentum", True), ("stop_gradient", False)])
def test_only_a_momentum_target_reports_its_momentum(target, has_momentum):
    run = SimpleNamespace(
        config=resolve("quickstart", {"objective": {"target": target}}),
        numbers=SimpleNamespace(receive=lambda before: [(0, [0.5, 3.0])]),
        reported=["objective", "effective_rank"],
        phases=SimpleNamespace(read=lambda before: {}),
        learning_rate=lambda step: 0.1,
        momentum=lambda step: 0.9,
    )
    ((_, metrics),) = Trainer.metrics(run, before=1)
    assert metrics == {"loss": 0.5, "effective_rank": 3.0, "lr": 0.1} | (
        {"target_momentum": 0.9} if has_momentum else {}
    )


def interrupt(folder: Path) -> None:
    """A run of 8 steps that reports every third, loses its last half, and goes on by a command without that key."""
    from unigrad_fast.training import loop

    def run(*telemetry: int) -> None:
        tree = {
            "output": folder / "run",
            "data": {"train": draw, "batch_size": 16, "image_size": 16, "threads": 1},
            "model": {"projector": {"width": 16}},
            "schedule": {"epochs": 4, "warmup_epochs": 0},
            "checkpoint": {"every": 2, "keep": 9},
            "engine": {"precision": "fp32", "device": "cpu"},
            "telemetry": dict(zip(("every", "effective_rank_every"), telemetry, strict=False)),
        }
        loop.pretrain(resolve("cifar_subset", tree), fall_back=True)

    draw = draw_tree(folder / "train", per_class=16)
    with thin(stages=1):
        run(3, 1)
        shutil.rmtree(RunFolder(folder / "run").complete_checkpoints()[-1])
        run()


@pytest.mark.long
def test_a_resumed_run_keeps_its_interval(tmp_path):
    process = start(interrupt, tmp_path)
    process.join(600)
    assert process.exitcode == 0
    events = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events if event["event"] == "resumed"] == ["resumed"]
    assert [event["step"] for event in events if event["event"] == "train"] == [1, 3, 6, 8]
