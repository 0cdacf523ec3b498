"""Loggers: what a run's events are handed to. RUN/metrics.jsonl has all of them; the others are a user's to choose."""

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

from unigrad_fast.runtime.run_folder import RunFolder
from unigrad_fast.runtime.shell import program, typed
from unigrad_fast.runtime.utf8_path import utf8_path
from unigrad_fast.runtime.whole_file import naming, write_whole
from unigrad_fast.training.telemetry.events import Events
from unigrad_fast.training.telemetry.length import Length


class Logger:
    """Takes the events of a run, on rank 0 alone."""

    def __init__(self, run: RunFolder, length: Length) -> None:
        """Nothing is written before `open`."""

    def open(self, start_step: int) -> None:
        """Begin, or go on; what an earlier process said of steps after this one does not count any more."""

    def write(self, event: str, step: int, numbers: Mapping[str, Any], about: Mapping[str, Any]) -> None:
        """`train`, `knn`, `warning` or `resumed`: measured numbers, None where not finite, and settings or texts."""

    def close(self) -> None:
        """The process ends."""

    def command(self, run: RunFolder) -> str | None:
        """What to type to look at it, given the run as the user would name it; None where there is nothing."""
        return None


class MetricsFile(Logger):
    """RUN/metrics.jsonl: one event per line, on its way to the disk as soon as it is written.

    Attributes:
        events: those up to the first step of this process; the rest was dropped.
        complaint: what was wrong with the file when it was opened, None when nothing was.
    """

    def __init__(self, run: RunFolder, length: Length) -> None:
        self.path, self.length = run.metrics, length
        self.events: list[dict[str, Any]] = []
        self.complaint: str | None = None

    def open(self, start_step: int) -> None:
        if self.path.is_file():
            found = Events(self.path)
            self.complaint = found.complaint
            kept = [(line, event) for line, event in found.whole if event["step"] <= start_step]
            self.events = [event for _, event in kept]
            write_whole(self.path, b"".join(line + b"\n" for line, _ in kept))
        self.file = self.path.open("a", encoding="utf-8", buffering=1)

    def write(self, event: str, step: int, numbers: Mapping[str, Any], about: Mapping[str, Any]) -> None:
        line = {"event": event, "step": step, "epoch": self.length.epoch(step), **numbers, **about}
        with naming(self.path):
            self.file.write(json.dumps(line, allow_nan=False) + "\n")
            self.file.flush()

    def sync(self) -> None:
        """Have everything on the disk."""
        with naming(self.path):
            os.fsync(self.file.fileno())

    def close(self) -> None:
        self.file.close()


class TensorBoard(Logger):
    """RUN/tensorboard: the numbers as TensorBoard's event files."""

    def __init__(self, run: RunFolder, length: Length) -> None:
        self.folder = run.tensorboard
        self._named = ExitStack()

    def open(self, start_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        purge = {"purge_step": start_step + 1} if start_step else {}
        self.folder.mkdir(exist_ok=True)
        self.writer = SummaryWriter(self._named.enter_context(utf8_path(self.folder)), **purge)

    def write(self, event: str, step: int, numbers: Mapping[str, Any], about: Mapping[str, Any]) -> None:
        with naming(self.folder):
            for name, value in numbers.items():
                if value is not None:
                    self.writer.add_scalar(f"{event}/{name}", value, step)

    def close(self) -> None:
        self.writer.close()
        self._named.close()

    def command(self, run: RunFolder) -> str | None:
        return typed(*program("tensorboard", "tensorboard.main"), "--logdir", run.tensorboard)


# Beside metrics.jsonl, by the key of the configuration's `telemetry` that turns it on.
LOGGERS: dict[str, type[Logger]] = {"tensorboard": TensorBoard}


def json_numbers(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The values as JSON takes them, non-finite ones as None, and those by name."""
    numbers, odd = {}, {}
    for name, value in values.items():
        value = value.item() if hasattr(value, "item") else value  # a 0-d tensor or a NumPy number
        if isinstance(value, float) and not math.isfinite(value):
            odd[name] = str(value)
            value = None
        numbers[name] = str(value) if isinstance(value, Path) else value
    return numbers, odd


def memory_gib() -> float:
    """Most memory in use so far, GiB: of the CUDA allocator where CUDA runs, else of the process."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)  # bytes on macOS, KiB elsewhere
