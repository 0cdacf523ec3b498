"""Runs one after another in one process leave nothing of theirs in it."""

from __future__ import annotations

import gc
import json
import logging
import os
import resource
import signal
import sys
import threading
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn_images import draw_tree
from forked import start
from tiny_run import settings_of, tiny

FEW = 4


def state() -> dict[str, Any]:
    """What a run could leave behind, as JSON values."""
    process = Path("/proc/self")
    status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
    of_torch = (torch.get_num_threads(), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"))
    precision = (torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark)
    return {
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "system's threads": int(status["Threads"]),
        "files": sorted(os.readlink(each) for each in (process / "fd").iterdir() if os.path.lexists(each)),
        "children": (process / f"task/{os.getpid()}/children").read_text().split(),
        "handlers": [str(signal.getsignal(number)) for number in sorted(signal.valid_signals() - {9, 19})],
        "wake-up": signal.set_wakeup_fd(-1),
        "errors": str(sys.excepthook),
        "variables": dict(os.environ),
        "filters": len(warnings.filters),
        "log handlers": sum(len(getattr(each, "handlers", ())) for each in logging.root.manager.loggerDict.values()),
        "disabled log": logging.root.manager.disable,
        "torch": [*of_torch, *precision],
        "group": torch.distributed.is_initialized(),
        "tensors": sum(isinstance(each, torch.Tensor) for each in gc.get_objects()),
    }


def resident() -> int:
    """Bytes of memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def train_in_turn(folder: Path, runs: int) -> None:
    from unigrad_fast import evaluate, load_encoder, pretrain

    draw_tree(folder / "train", per_class=16)
    draw_tree(folder / "val", per_class=8)
    changes = {"schedule": {"epochs": 1, "warmup_epochs": 0}, "telemetry": {"every": 1, "tensorboard": True}}
    settings = {**settings_of(folder), **changes}
    found = []
    with nullcontext() if runs > FEW else tiny():
        for number in range(runs):
            run = pretrain(**settings, output=folder / f"{number}")
            evaluate.knn(run)
            load_encoder(run)(torch.zeros(2, 3, 16, 16))
            weights = sum(each.numel() * each.element_size() for each in load_encoder(run).state_dict().values())
            del run
            gc.collect()
            found.append((state(), resident(), weights))
    (folder / "found.json").write_text(json.dumps(found))


@pytest.mark.long
@pytest.mark.parametrize("runs", [FEW, pytest.param(10, marks=pytest.mark.slow)])
def test_runs_leave_nothing_behind(tmp_path, runs):
    process = start(train_in_turn, tmp_path, runs, has_children=True)
    process.join(600)
    assert process.exitcode == 0
    found = json.loads((tmp_path / "found.json").read_text())
    first, last = found[1][0], found[-1][0]  # the one before imports libraries, which stay
    assert not [file for file in last["files"] if file.startswith("socket:")]
    assert last == first
    if runs > FEW:
        # A run holds its weights several times. Did each leave one copy behind, memory would grow by that much. The
        # allocator fills its arenas in the first half; a tiny network's weights would be less than that.
        _, before, weights = found[runs // 2]
        assert found[-1][1] - before < (runs - 1 - runs // 2) * weights
