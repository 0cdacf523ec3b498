"""Settings of a run of seconds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import interrupted_run
from thin import thin

from unigrad_fast import Run

EPOCHS, STEPS_PER_EPOCH = 2, 3
LAST = EPOCHS * STEPS_PER_EPOCH


@contextmanager
def fast() -> Iterator[None]:
    """Inside, runs are tiny, and their curves, which take a second, are not drawn."""
    from unigrad_fast.training.telemetry import curves

    with tiny(), mock.patch.object(curves, "draw_comparison", _draw):
        yield


def _draw(runs: Mapping[str, Path], path: Path) -> Path:
    path.write_bytes(b"\x89PNG")
    return path


def tiny() -> AbstractContextManager:
    """Inside, resnet18 is two stages of a thin one."""
    return thin(stages=2)


def settings_of(images: Path) -> dict[str, Any]:
    """Settings of a run of six steps with an evaluation and a checkpoint after each epoch."""
    return {
        "recipe": "cifar_subset",
        "data": {
            **{"train": images / "train", "val": images / "val"},
            **{"batch_size": 32, "image_size": 16, "threads": 1},
        },
        "model.projector.width": 32,
        "schedule": {"epochs": EPOCHS, "warmup_epochs": 1},
        "evaluation": {"every": 1},
        "telemetry": {"every": 1, "effective_rank_every": 1, "tensorboard": False},
        "engine": {"precision": "fp32", "threads": 1, "device": "cpu"},
    }


def require_equal(one: Run, other: Run) -> None:
    """All metrics that no clock decides, accuracies, and the last checkpoint, bit for bit."""
    interrupted_run.require_equal(one.path, other.path, LAST)
    for name in ("step", "lr"):
        assert one.metrics[name] == other.metrics[name], name
    assert one.evaluations["accuracy"] == other.evaluations["accuracy"]
