"""Progress of a run: a bar if the console is a terminal or a notebook, otherwise a line every few seconds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from unigrad_fast.training.telemetry.throughput import Length

PLAIN_SECONDS = 5.0  # least time between two progress lines without a terminal
NOTEBOOK_SECONDS = 0.5  # and between two messages to a notebook's page
BAR_WIDTH = 20  # characters

# Columns of a progress line: key, label, format, width of the value.
COLUMNS = (
    ("loss", "loss", ".4f", 8),
    ("positive_cosine", "cosine", ".3f", 6),
    ("feature_std", "std", ".3f", 5),
    ("lr", "lr", ".2e", 8),
    ("images_per_second", "images/s", ".0f", 6),
    ("data_wait_share", "data wait", ".0%", 4),
)
IN_BAR = {"loss", "positive_cosine", "images_per_second", "data_wait_share"}  # a terminal is too narrow for all


class ProgressBar:
    """A bar below everything that is printed."""

    def __init__(self, console: Console, length: Length, step: int) -> None:
        self.length = length
        self.bar = Progress(
            TextColumn(f"epoch {{task.fields[epoch]:.1f}}/{length.epoch(length.total_steps):g}"),
            BarColumn(bar_width=BAR_WIDTH),
            TextColumn("{task.percentage:.0f} %  left {task.fields[left]}  {task.fields[values]}"),
            console=console,
            refresh_per_second=4,
        )
        self.task = self.bar.add_task("", total=length.total_steps)
        self.update(step, {}, None)
        self.bar.start()

    def update(self, step: int, numbers: Mapping[str, float | None], seconds_left: float | None) -> None:
        self.bar.update(
            self.task,
            completed=step,
            epoch=self.length.epoch(step),
            left=duration(seconds_left),
            values=in_bar(numbers),
        )

    def stop(self) -> None:
        self.bar.stop()


class NotebookBar:
    """A line of text in the output of a notebook's cell, which is replaced as the run goes on."""

    def __init__(self, length: Length, clock: Callable[[], float] = time.monotonic) -> None:
        from IPython.display import display

        self.length, self.clock, self.last = length, clock, clock()
        self.line = ""
        self.handle: Any = display({"text/plain": ""}, raw=True, display_id=True)

    def update(self, step: int, numbers: Mapping[str, float | None], seconds_left: float | None) -> None:
        total = self.length.total_steps
        full = BAR_WIDTH * step // total
        place = f"epoch {self.length.epoch(step):.1f}/{self.length.epoch(total):g}"
        bar = f"{'█' * full}{'░' * (BAR_WIDTH - full)} {100 * step // total} %"
        self.line = f"{place} {bar}  left {duration(seconds_left)}  {in_bar(numbers)}"
        if self.clock() - self.last >= NOTEBOOK_SECONDS:
            self._show()

    def stop(self) -> None:
        self._show()

    def _show(self) -> None:
        self.last = self.clock()
        self.handle.update({"text/plain": self.line}, raw=True)


def in_bar(numbers: Mapping[str, float | None]) -> str:
    """The numbers that a bar shows, with their labels."""
    found = [(label, numbers.get(name), form) for name, label, form, _ in COLUMNS if name in IN_BAR]
    return "  ".join(f"{label} {value:{form}}" for label, value, form in found if value is not None)


class ProgressLines:
    """Lines with a column for each number, at most one every PLAIN_SECONDS."""

    def __init__(self, length: Length, clock: Callable[[], float]) -> None:
        self.length, self.clock = length, clock
        self.last = -math.inf  # when the last line was due

    def is_due(self, step: int) -> bool:
        if self.clock() - self.last < PLAIN_SECONDS and step != self.length.total_steps:
            return False
        self.last = self.clock()
        return True

    def line(self, step: int, numbers: Mapping[str, float | None], seconds_left: float | None) -> str:
        total = self.length.total_steps
        columns = "  ".join(
            f"{label} {'–' if numbers.get(name) is None else format(numbers[name], form):>{width}}"
            for name, label, form, width in COLUMNS
        )
        place = f"step {step:>{len(str(total))}}/{total}  epoch {self.length.epoch(step):7.2f}"
        return f"{place}  {columns}  left {duration(seconds_left):>9}"


def duration(seconds: float | None) -> str:
    """Hours, minutes and seconds, as in 1:02:03."""
    if seconds is None:
        return "?"
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"
