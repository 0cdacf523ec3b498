"""Loggers receive a run's events. RUN/metrics.jsonl always gets all of them; users may choose others besides."""

from __future__ import annotations

import json
import math
import os
import resource
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from unigrad_fast.runtime.files import naming, utf8_path, write_whole
from unigrad_fast.runtime.run_folder import RunFolder
from unigrad_fast.runtime.shell import program, typed
from unigrad_fast.training.telemetry.events import read_lines
from unigrad_fast.training.telemetry.throughput import Length

# TensorBoard's groups of the numbers that do not judge the training, and what it compares runs by.
GROUPS = {"images_per_second": "time", "data_wait_share": "time", "memory_gib": "system"}
COMPARED = (
    *("recipe", "seed", "data.preset", "data.batch_size", "data.image_size", "model.backbone", "model.projector.width"),
    *("objective.method", "objective.form", "objective.balance", "objective.decay", "objective.temperature"),
    *("target.momentum", "optimizer.name", "optimizer.base_lr", "optimizer.weight_decay", "schedule.epochs"),
)
RESULTS = {"knn/accuracy": None, "train/loss": None}


class Logger:
    """Receives the events of a run, on rank 0 only."""

    def __init__(self, run: RunFolder, length: Length, settings: Mapping[str, Any]) -> None:
        """Nothing is written before `open`.

        `settings` are the values by dotted key of the run's configuration, without those that have no effect.
        """

    def open(self, start_step: int) -> None:
        """Begin or continue; discard what an earlier process wrote about later steps."""

    def write(self, event: str, step: int, numbers: Mapping[str, Any], about: Mapping[str, Any]) -> None:
        """Write a `train`, `knn`, `warning` or `resumed` event.

        `numbers` are measurements, None where not finite; `about` are settings or texts.
        """

    def close(self) -> None:
        """Called when the process ends."""

    def command(self, run: RunFolder) -> str | None:
        """The shell command that shows this log, given the run as the user would name it; None if there is none."""
        return None


class MetricsFile(Logger):
    """RUN/metrics.jsonl: one event per line, flushed after each.

    Attributes:
        events: events up to the first step of this process; later ones were dropped.
        complaint: what was wrong with the file when it was opened; None if nothing.
    """

    def __init__(self, run: RunFolder, length: Length, settings: Mapping[str, Any]) -> None:
        self.path, self.length = run.metrics, length
        self.events: list[dict[str, Any]] = []
        self.complaint: str | None = None

    def open(self, start_step: int) -> None:
        if self.path.is_file():
            whole, self.complaint = read_lines(self.path)
            kept = [(line, event) for line, event in whole if event["step"] <= start_step]
            self.events = [event for _, event in kept]
            write_whole(self.path, b"".join(line + b"\n" for line, _ in kept))
        self.file = self.path.open("a", encoding="utf-8", buffering=1)

    def write(self, event: str, step: int, numbers: Mapping[str, Any], about: Mapping[str, Any]) -> None:
        line = {"event": event, "step": step, "epoch": self.length.epoch(step), **numbers, **about}
        with naming(self.path):
            self.file.write(json.dumps(line, allow_nan=False) + "\n")
            self.file.flush()

    def sync(self) -> None:
        """Force everything to disk."""
        with naming(self.path):
            os.fsync(self.file.fileno())

    def close(self) -> None:
        self.file.close()


class TensorBoard(Logger):
    """RUN/tensorboard: the numbers as TensorBoard's event files, and the settings for its tab of hyperparameters."""

    def __init__(self, run: RunFolder, length: Length, settings: Mapping[str, Any]) -> None:
        self.folder, self.settings = run.tensorboard, settings
        self._named = ExitStack()

    def open(self, start_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import
        from torch.utils.tensorboard.summary import hparams

        purge = {"purge_step": start_step + 1} if start_step else {}
        self.folder.mkdir(exist_ok=True)
        self.writer = SummaryWriter(self._named.enter_context(utf8_path(self.folder)), **purge)
        # The tab takes its columns from any one of the runs, so each names all of them; one that it lacks is a number.
        taken = {key: self.settings.get(key) for key in COMPARED}
        columns, _, _ = hparams({key: 0 if value is None else value for key, value in taken.items()}, RESULTS)
        _, values, _ = hparams(taken, RESULTS)
        for summary in (columns, values):
            self.writer.file_writer.add_summary(summary)

    def write(self, event: str, step: int, numbers: Mapping[str, Any], about: Mapping[str, Any]) -> None:
        with naming(self.folder):
            for name, value in numbers.items():
                if value is not None:
                    group = "time" if name.startswith("ms_") else GROUPS.get(name, event)
                    self.writer.add_scalar(f"{group}/{name}", value, step)

    def close(self) -> None:
        self.writer.close()
        self._named.close()

    def command(self, run: RunFolder) -> str | None:
        return typed(*program("tensorboard", "tensorboard.main"), "--logdir", run.tensorboard)


# Loggers besides metrics.jsonl, by the key under `telemetry` that turns each on.
LOGGERS: dict[str, type[Logger]] = {"tensorboard": TensorBoard}


def json_numbers(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The values as JSON numbers, non-finite ones as None; and the non-finite ones by name, as text."""
    numbers, odd = {}, {}
    for name, value in values.items():
        value = value.item() if hasattr(value, "item") else value  # a 0-d tensor or a NumPy number
        if isinstance(value, float) and not math.isfinite(value):
            odd[name] = str(value)
            value = None
        numbers[name] = str(value) if isinstance(value, Path) else value
    return numbers, odd


def memory_gib() -> float:
    """Peak memory so far, GiB: the CUDA allocator's if CUDA is in use, else the process's."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)  # bytes on macOS, KiB elsewhere
