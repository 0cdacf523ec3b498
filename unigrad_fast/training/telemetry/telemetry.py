"""The telemetry of a run: shows progress, writes metrics and watches for collapse.

Only rank 0 writes; on other ranks every method returns at once.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

import unigrad_fast
from unigrad_fast.config import Config
from unigrad_fast.evaluation.knn import BRANCH, PROTOCOL, KNNResult
from unigrad_fast.runtime.console import in_notebook, new_console
from unigrad_fast.runtime.errors import StopRun
from unigrad_fast.runtime.files import write_whole
from unigrad_fast.runtime.run_folder import RunFolder, log_line
from unigrad_fast.runtime.shell import typed
from unigrad_fast.runtime.validation import leaves
from unigrad_fast.runtime.wording import count
from unigrad_fast.training.telemetry.callbacks import Callbacks
from unigrad_fast.training.telemetry.collapse import CollapseWatch
from unigrad_fast.training.telemetry.loggers import LOGGERS, MetricsFile, json_numbers, memory_gib
from unigrad_fast.training.telemetry.progress import NotebookBar, ProgressBar, ProgressLines
from unigrad_fast.training.telemetry.results import Results, final_table
from unigrad_fast.training.telemetry.throughput import Length, Throughput


class Telemetry:
    """Progress, metrics, warnings and summary of one run; a context manager that opens and closes its files.

    Args:
        run_dir: the run's folder; it is created.
        config: the run's configuration.
        total_steps, steps_per_epoch: optimizer steps.
        start_step: steps done when this process begins. Events of later steps, which a killed process left in
            metrics.jsonl, are dropped; new events are appended.
        progress: what `progress_so_far` returned when `start_step` was saved.
        rank: rank of this process; only 0 shows and writes anything.
        console: where to print; standard output by default.
        clock: seconds, monotonic.
        callbacks: a caller's functions.

    Attributes:
        stopped_by: the callback that asked for the end of the run; empty if none did.
    """

    def __init__(
        self,
        run_dir: Path | str,
        config: Config,
        total_steps: int,
        steps_per_epoch: int,
        rank: int = 0,
        start_step: int = 0,
        progress: Mapping[str, Any] | None = None,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
        callbacks: Callbacks | None = None,
    ) -> None:
        self.run = RunFolder(Path(run_dir))
        self.active = rank == 0
        self.step = self.start_step = start_step
        self.length = Length(total_steps, steps_per_epoch, config.evaluation.every * steps_per_epoch or total_steps)
        unused = config.unused()
        settings = {key: value for key, value in leaves(config) if key not in unused}
        self.metrics = MetricsFile(self.run, self.length, settings)
        wanted = [logger for key, logger in LOGGERS.items() if getattr(config.telemetry, key)]
        self.loggers = [self.metrics, *(logger(self.run, self.length, settings) for logger in wanted)]
        self.messages = Messages(console or new_console(), self.run.log)
        self.lines = ProgressLines(self.length, clock)
        self.bar: ProgressBar | NotebookBar | None = None  # in place of the lines
        self.throughput = Throughput(self.length, clock, progress or {})
        warmup_steps = round(config.schedule.warmup_epochs * steps_per_epoch)
        self.collapse = CollapseWatch(
            warmup_steps, has_balance=isinstance(getattr(config.objective, "balance", None), float)
        )
        self.results = Results()
        self.named_non_finite: set[str] = set()
        self.failed: set[str] = set()
        self.callbacks, self.stopped_by = callbacks or Callbacks(), ""

    def __enter__(self) -> Telemetry:
        if not self.active:
            return self
        self.run.path.mkdir(parents=True, exist_ok=True)
        for logger in self.loggers:
            logger.open(self.start_step)
        for event in self.metrics.events:
            self.results.remember(event)
            if event["event"] == "warning":
                self.collapse.remember(event["message"])
        self.messages.open()
        self.messages.log(f"unigrad-fast {unigrad_fast.__version__}, torch {torch.__version__}, on {platform.node()}")
        self.messages.log(f"command: {typed(*sys.argv)}")
        self.messages.log(f"{self.length.total_steps} steps, {self.length.steps_per_epoch} per epoch")
        if self.messages.console.is_terminal:
            self.bar = ProgressBar(self.messages.console, self.length, self.step)
        elif in_notebook():
            self.bar = NotebookBar(self.length)
        self._move_bar()
        if self.metrics.complaint:
            self.warn(self.metrics.complaint)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if not self.active:
            return
        if self.bar is not None:
            self.bar.stop()
        if kind is not None:
            self.messages.log(f"stopped at step {self.step} by {kind.__name__}: {error}")
        for logger in self.loggers:
            with self.spared(type(logger).__name__):
                logger.close()
        self.messages.close()

    def resumed(self) -> None:
        """Says that this process continues a run, and records it as an event."""
        if self.active:
            self._write("resumed", self.start_step)
            self.say(f"resuming after step {self.start_step} of {self.length.total_steps}")

    def evaluated(self, step: int) -> bool:
        """Whether the encoder after this step was evaluated, on rank 0; False on other ranks."""
        return any(step == at for at, _ in self.results.accuracies)

    def progress_so_far(self) -> dict[str, Any]:
        """What a later process needs to continue, as JSON values; forces the metrics so far to disk."""
        if not self.active:
            return {}
        with self.spared(type(self.metrics).__name__):
            self.metrics.sync()
        return self.throughput.so_far()

    def advance(self, step: int, images: int, data_seconds: float = 0.0) -> None:
        """Call after every step; does not wait for the device.

        `images` counts those of all ranks in the step, `data_seconds` the time it waited for data.
        """
        if not self.active:
            return
        self.step = step
        self.throughput.step(images, data_seconds)
        self._move_bar()

    def evaluation(self) -> AbstractContextManager[None]:
        """Time inside counts as evaluation: excluded from throughput, included in the estimate of the time left."""
        return self.throughput.evaluation()

    def log_train(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Writes the metrics of a step, numbers or 0-d tensors, and warns of collapse. May be called a few steps late.

        `images_per_second`, `data_wait_share` and `memory_gib` are added here.
        """
        if not self.active:
            return
        self.step = max(self.step, step)
        numbers, odd = json_numbers({"memory_gib": memory_gib(), **self.throughput.recent(), **metrics})
        self._write("train", step, numbers)
        self.results.add_step(numbers)
        if odd:
            self._warn_non_finite(step, odd)
        if message := self.collapse.check(step, numbers):
            self.warn(message, step)
        self._move_bar()
        if self.bar is None and self.lines.is_due(step):
            self.say(self.lines.line(step, numbers, self.throughput.seconds_left(self.step)))
        self._tell("on_step", step, numbers)

    def log_knn(self, step: int, result: KNNResult) -> None:
        """Writes and shows the kNN accuracy of the online backbone after a step, with its settings and components."""
        if not self.active:
            return
        self.step = max(self.step, step)
        accuracies = {"accuracy": result.accuracy} | ({} if result.top5 is None else {"top5": result.top5})
        settings = {"k": result.k, "temperature": result.temperature, "protocol": PROTOCOL, "branch": BRANCH}
        components = {} if result.components is None else {"principal_components": result.components}
        self._write("knn", step, accuracies | components, settings)
        self.results.accuracies.append((step, result.accuracy))
        first_step, first = self.results.accuracies[0]
        compared = f", {first:.2f} % at step {first_step}" if len(self.results.accuracies) > 1 else ""
        counted = f", {count(result.components, 'principal component')}" if components else ""
        self.say(
            f"epoch {self.length.epoch(step):.2f}  kNN accuracy {result.accuracy:.2f} %{compared}"
            f"  (weighted kNN, k {result.k}, T {result.temperature:g}, online backbone){counted}"
        )
        self._tell("on_evaluation", step, {**accuracies, **settings})

    def saved(self, step: int, folder: Path) -> None:
        """Call when the checkpoint of a step is complete."""
        if self.active:
            self._tell("on_checkpoint", step, folder)

    def warn(self, message: str, step: int | None = None) -> None:
        """Shows a conspicuous warning and records it as an event, by default of the latest step."""
        if self.active:
            self._write("warning", self.step if step is None else step, about={"message": message})
            self.messages.warn(message)

    def say(self, message: str) -> None:
        """Shows a line on the console, above the progress bar, and records it in the log."""
        if self.active:
            self.messages.say(message)

    def finish(self, summary: Mapping[str, Any] | None = None, next_commands: Sequence[str] = ()) -> dict[str, Any]:
        """Shows the final table and the commands to type next; writes summary.json and returns its content.

        summary: further entries, each a row of the table (percent if the name begins with knn_); an entry of the
            same name replaces one of the telemetry's own.
        """
        if not self.active:
            return {}
        times = self.throughput.so_far()
        own = {
            "steps": self.step,
            "epochs": self.length.epoch(self.step),
            **self.results.final(),
            "images_per_second": self.throughput.overall(),
            "evaluation_seconds": sum(times["evaluation_seconds"]),
            "wall_seconds": times["wall_seconds"],
        }
        numbers, _ = json_numbers(own | dict(summary or {}))
        text = json.dumps(numbers, allow_nan=False, indent=2)
        write_whole(self.run.summary, f"{text}\n".encode())
        self.messages.log(f"finished: {json.dumps(numbers, allow_nan=False)}")
        if self.bar is not None:
            self.bar.stop()
        further = [name for name in summary or {} if name not in own]
        self.messages.console.print(final_table(numbers, further, self.results, self.run.path))
        if next_commands:
            self.messages.show("Next:")
            for command in next_commands:
                self.messages.show(f"  {command}")
        return numbers

    def commands(self, run: RunFolder) -> list[str]:
        """The shell commands that show the logs, given the run as the user would name it."""
        return [command for logger in self.loggers if (command := logger.command(run))]

    @contextmanager
    def spared(self, what: str) -> Iterator[None]:
        """An error inside costs neither the run nor its summary; the first one of each name is shown."""
        try:
            yield
        except Exception as error:
            if self.active and what not in self.failed:
                self.failed.add(what)
                named = isinstance(error, OSError) and error.filename
                why = f"{error.filename}: {error.strerror}" if named else f"{type(error).__name__}: {error}"
                self.messages.warn(f"{what} failed ({' '.join(why.split())}); the run goes on")

    def _write(
        self, event: str, step: int, numbers: Mapping[str, Any] | None = None, about: Mapping[str, Any] | None = None
    ) -> None:
        for logger in self.loggers:
            with self.spared(type(logger).__name__):
                logger.write(event, step, numbers or {}, about or {})

    def _tell(self, name: str, step: int, what: Any) -> None:
        call = getattr(self.callbacks, name)
        try:
            if call is not None:
                call(step, what)
        except StopRun:
            self.stopped_by = self.stopped_by or name

    def _warn_non_finite(self, step: int, odd: Mapping[str, str]) -> None:
        """Every occurrence is an event; the console shows one warning per metric."""
        message = f"non-finite at step {step}, written as null: " + ", ".join(f"{k} = {v}" for k, v in odd.items())
        if odd.keys() <= self.named_non_finite:
            self._write("warning", step, about={"message": message})
            self.messages.log_warning(message)
        else:
            self.named_non_finite |= odd.keys()
            self.warn(message, step)

    def _move_bar(self) -> None:
        if self.bar is not None:
            numbers = self.results.latest | self.throughput.recent()
            self.bar.update(self.step, numbers, self.throughput.seconds_left(self.step))


class Messages:
    """Lines and warnings on the console and, with the time of day, in RUN/log.txt.

    Text is printed without interpreting markup, because a folder's name may look like it.
    """

    def __init__(self, console: Console, path: Path) -> None:
        self.console, self.path = console, path

    def open(self) -> None:
        self.failed = False
        self.file = self.path.open("a", encoding="utf-8", errors="surrogateescape", buffering=1)

    def close(self) -> None:
        with suppress(OSError):  # a message that could not be written before
            self.file.close()

    def say(self, message: str) -> None:
        self.log(message)
        self.show(message)

    def warn(self, message: str) -> None:
        """Shown in a frame if the console is a terminal."""
        self.log_warning(message)
        if self.console.is_terminal:
            self.console.print(Panel(Text(message), title="Warning", title_align="left", border_style="bold yellow"))
        else:
            self.show(f"WARNING: {message}")

    def log(self, message: str) -> None:
        """Write to the file only; if that fails, say so once."""
        try:
            self.file.write(log_line(message))
        except OSError as error:
            if not self.failed:
                self.failed = True
                self.show(f"WARNING: {self.path} cannot be written ({error.strerror}); the run goes on")

    def log_warning(self, message: str) -> None:
        self.log(f"WARNING: {message}")

    def show(self, message: str) -> None:
        """Print on the console only."""
        self.console.print(message, soft_wrap=True, markup=False, highlight=False)
