"""The metrics of a run in files: RUN/metrics.jsonl and RUN/tensorboard."""

from __future__ import annotations

import json
import math
import os
import resource
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from unigrad_fast.runtime.utf8_path import utf8_path
from unigrad_fast.runtime.whole_file import naming, write_whole
from unigrad_fast.training.telemetry.events import Events
from unigrad_fast.training.telemetry.length import Length

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class MetricsFile:
    """RUN/metrics.jsonl: one event per line, on its way to the disk as soon as it is written.

    Attributes:
        complaint: what was wrong with the file when it was opened, None when nothing was.
    """

    def __init__(self, path: Path, length: Length) -> None:
        self.path, self.length = path, length
        self.complaint: str | None = None

    def open(self, start_step: int) -> list[dict[str, Any]]:
        """Open the file to add to it; returns its events up to the first step of this process, and drops the rest."""
        kept = []
        if self.path.is_file():
            found = Events(self.path)
            self.complaint = found.complaint
            kept = [(line, event) for line, event in found.whole if event["step"] <= start_step]
            write_whole(self.path, b"".join(line + b"\n" for line, _ in kept))
        self.file = self.path.open("a", encoding="utf-8", buffering=1)
        return [event for _, event in kept]

    def write(self, event: str, step: int, fields: Mapping[str, Any]) -> None:
        line = {"event": event, "step": step, "epoch": self.length.epoch(step), **fields}
        with naming(self.path):
            self.file.write(json.dumps(line, allow_nan=False) + "\n")
            self.file.flush()

    def sync(self) -> None:
        """Have everything on the disk."""
        with naming(self.path):
            os.fsync(self.file.fileno())

    def close(self) -> None:
        self.file.close()


class TensorBoard:
    """RUN/tensorboard: the same numbers as TensorBoard's event files, where they are wanted."""

    def __init__(self, folder: Path, wanted: bool) -> None:
        self.folder, self.wanted = folder, wanted
        self.writer: SummaryWriter | None = None
        self._named = ExitStack()

    def open(self, start_step: int) -> None:
        """Begin a file; what others say of steps after the first of this process does not count any more."""
        if self.wanted:
            from torch.utils.tensorboard import SummaryWriter  # slow to import

            purge = {"purge_step": start_step + 1} if start_step else {}
            self.folder.mkdir(exist_ok=True)
            self.writer = SummaryWriter(self._named.enter_context(utf8_path(self.folder)), **purge)

    def add(self, group: str, step: int, numbers: Mapping[str, Any]) -> None:
        """Write the numbers that are not None."""
        if self.writer is not None:
            with naming(self.folder):
                for name, value in numbers.items():
                    if value is not None:
                        self.writer.add_scalar(f"{group}/{name}", value, step)

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
        self._named.close()


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
