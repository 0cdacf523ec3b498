"""What a run tells while it trains: progress on the console, metrics in files, warnings, a summary.

    RUN/metrics.jsonl   one JSON object per line, flushed at once; events `train`, `knn`, `warning` and `resumed`
    RUN/log.txt         what the console showed, with the time of day
    RUN/tensorboard/    the same numbers for TensorBoard
    RUN/summary.json    the final numbers

Only rank 0 writes; on other ranks every method returns at once. A step is an optimizer step, and a step
number counts those that are complete: 0 is the untrained encoder, `total_steps` the last.
"""

from __future__ import annotations

import json
import math
import os
import platform
import resource
import shlex
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

import unigrad_fast
from unigrad_fast.evaluation.knn import BRANCH, PROTOCOL
from unigrad_fast.runtime.whole_file import write_whole
from unigrad_fast.training.phases import PHASES

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from unigrad_fast.config import Config
    from unigrad_fast.evaluation.knn import KNNResult

# sqrt(C) times the mean per-channel deviation of unit embeddings is 1 when they spread evenly over the sphere
# and 0 when all of them are one vector.
COLLAPSED_FEATURE_STD = 0.1
# The participation ratio trace(F)² / ‖F‖² counts the directions that embeddings use: C at best, 1 when they
# lie on one line. It can collapse while the deviation stays healthy, as two opposite vectors show.
COLLAPSED_EFFECTIVE_RANK = 2.0

COLLAPSING = "the embeddings are collapsing"

WINDOW = 50  # steps that the running throughput looks back on
PLAIN_SECONDS = 5.0  # least time between two progress lines where there is no terminal

PHASE_METRICS = tuple(f"ms_{phase}" for phase in PHASES)

# Columns of a progress line: key, label, format, width of the value.
COLUMNS = (
    ("loss", "loss", ".4f", 8),
    ("positive_cosine", "cosine", ".3f", 6),
    ("feature_std", "std", ".3f", 5),
    ("lr", "lr", ".2e", 8),
    ("images_per_second", "images/s", ".0f", 6),
    ("data_wait_share", "data wait", ".0%", 4),
)


class CollapseWatch:
    """Tells once when the embeddings have collapsed.

    Args:
        warmup_steps: steps at the start in which nothing is said, for an untrained projector may look
            collapsed.
    """

    def __init__(self, warmup_steps: int) -> None:
        self.warmup_steps = warmup_steps
        self.warned = False

    def check(self, step: int, metrics: Mapping[str, float | None]) -> str | None:
        """The warning, the first time that `feature_std` or `effective_rank` is too low, else None."""
        if self.warned or step <= self.warmup_steps:
            return None
        limits = {"feature_std": COLLAPSED_FEATURE_STD, "effective_rank": COLLAPSED_EFFECTIVE_RANK}
        signs = [
            f"{name} is {metrics[name]:.3g}, below {limit:g}"
            for name, limit in limits.items()
            if metrics.get(name) is not None and metrics[name] < limit
        ]
        if not signs:
            return None
        self.warned = True
        return (
            f"{COLLAPSING}: {' and '.join(signs)}. The encoder maps all images to nearly "
            f"the same embedding and learns nothing; raise objective.balance or lower optimizer.base_lr"
        )


class Throughput:
    """Images per second over the last steps and over the run, without the time spent evaluating."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.excluded = 0.0  # seconds of evaluation so far
        self.images = 0
        # (training time at the step's end, images until then, seconds waited for data until then)
        self.marks: deque[tuple[float, int, float]] = deque(maxlen=WINDOW + 1)
        self.first: tuple[float, int, float] | None = None
        self.waited = 0.0

    def step(self, images: int, data_seconds: float) -> None:
        self.images += images
        self.waited += data_seconds
        self.marks.append((self.clock() - self.excluded, self.images, self.waited))
        # Counting starts at the end of the first step: it holds the start-up of loader and libraries.
        self.first = self.first or self.marks[0]

    def recent(self) -> dict[str, float]:
        """`images_per_second` and `data_wait_share` over the window; empty before the second step."""
        seconds, images, waited = self._between(self.marks[0] if self.marks else None)
        return {"images_per_second": images / seconds, "data_wait_share": waited / seconds} if seconds > 0 else {}

    def seconds_per_step(self) -> float | None:
        seconds = self._between(self.marks[0] if self.marks else None)[0]
        return seconds / (len(self.marks) - 1) if seconds > 0 else None

    def overall(self) -> float | None:
        """Images per second of training since the end of the first step."""
        seconds, images, _ = self._between(self.first)
        return images / seconds if seconds > 0 else None

    def _between(self, start: tuple[float, int, float] | None) -> tuple[float, ...]:
        return tuple(b - a for a, b in zip(start, self.marks[-1], strict=True)) if start else (0.0, 0, 0.0)


class Telemetry:
    """Progress, metrics, warnings and summary of one run; a context manager that opens and closes its files.

    Args:
        run_dir: the run's folder; it is created.
        config: the run's configuration.
        total_steps, steps_per_epoch: optimizer steps.
        start_step: steps done when this process begins. What metrics.jsonl says of later ones, left by a process
            that was killed, is dropped; the rest is continued.
        progress: what `progress_so_far` returned when `start_step` was saved.
        rank: of this process; only 0 shows and writes anything.
        console: where to show; standard output by default.
        clock: seconds, monotonic.
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
    ) -> None:
        self.run_dir = Path(run_dir)
        self.config = config
        self.total_steps = total_steps
        self.steps_per_epoch = steps_per_epoch
        self.active = rank == 0
        self.console = console or Console()
        self.clock = clock
        self.throughput = Throughput(clock)
        self.collapse = CollapseWatch(round(config.schedule.warmup_epochs * steps_per_epoch))
        self.step = self.start_step = start_step
        self.restored = progress or {}
        self.latest: dict[str, float] = {}  # the newest finite value of each training metric
        self.accuracies: list[tuple[int, float]] = []  # (step, percent) of each kNN evaluation
        self.evaluation_seconds: list[float] = list(self.restored.get("evaluation_seconds", []))
        self.phase_sums: Counter[str] = Counter()  # milliseconds of the reported steps
        self.reported_steps = 0
        self.named_non_finite: set[str] = set()
        self.last_line = -math.inf
        self.progress: Progress | None = None
        self.tensorboard: SummaryWriter | None = None

    def __enter__(self) -> Telemetry:
        self.started = self.clock() - self.restored.get("wall_seconds", 0.0)
        if not self.active:
            return self
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self._continue_metrics()
        self.metrics_file = (self.run_dir / "metrics.jsonl").open("a", encoding="utf-8", buffering=1)
        self.log_file = (self.run_dir / "log.txt").open("a", encoding="utf-8", buffering=1)
        self._log(f"unigrad-fast {unigrad_fast.__version__}, torch {torch.__version__}, on {platform.node()}")
        self._log(f"command: {shlex.join(sys.argv)}")
        self._log(f"{self.total_steps} steps, {self.steps_per_epoch} per epoch")
        if self.config.telemetry.tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # slow to import

            purge = {"purge_step": self.start_step + 1} if self.start_step else {}
            self.tensorboard = SummaryWriter(str(self.run_dir / "tensorboard"), **purge)
        if self.console.is_terminal:
            self.progress = Progress(
                TextColumn("epoch {task.fields[epoch]:.1f}/{task.fields[epochs]:g}"),
                BarColumn(bar_width=20),
                TextColumn("{task.percentage:.0f} %  left {task.fields[left]}  {task.fields[values]}"),
                console=self.console,
                refresh_per_second=4,
            )
            epochs = self.total_steps / self.steps_per_epoch
            self.task = self.progress.add_task(
                "",
                total=self.total_steps,
                completed=self.step,
                epoch=self._epoch(self.step),
                epochs=epochs,
                left="?",
                values="",
            )
            self.progress.start()
            self._refresh_bar()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if not self.active:
            return
        if self.progress is not None:
            self.progress.stop()
        if kind is not None:
            self._log(f"stopped at step {self.step} by {kind.__name__}: {error}")
        if self.tensorboard is not None:
            self.tensorboard.close()
        self.metrics_file.close()
        self.log_file.close()

    def _continue_metrics(self) -> None:
        """Keep the events up to the first step of this process, and remember what they say."""
        path = self.run_dir / "metrics.jsonl"
        if not path.is_file():
            return
        kept = []
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                event = json.loads(line)
            except ValueError:  # the last line of a process that was killed while writing it
                continue
            if event["step"] <= self.start_step:
                kept.append(line)
                self._remember(event)
        write_whole(path, "".join(f"{line}\n" for line in kept).encode())

    def _remember(self, event: Mapping[str, Any]) -> None:
        if event["event"] == "train":
            self.latest |= {k: v for k, v in event.items() if k not in ("event", "step", "epoch") and v is not None}
        elif event["event"] == "knn":
            self.accuracies.append((event["step"], event["accuracy"]))
        elif event["event"] == "warning" and event["message"].startswith(COLLAPSING):
            self.collapse.warned = True

    def resumed(self) -> None:
        """Says that this process goes on with what another began, and records it as an event."""
        if self.active:
            self._event("resumed", self.start_step, {})
            self.say(f"going on after step {self.start_step} of {self.total_steps}")

    def evaluated(self, step: int) -> bool:
        """Whether the encoder after this step was evaluated, on rank 0; False on other ranks."""
        return any(step == at for at, _ in self.accuracies)

    def progress_so_far(self) -> dict[str, Any]:
        """What a later process needs to go on with, JSON values; the metrics until now are on the disk then."""
        if not self.active:
            return {}
        os.fsync(self.metrics_file.fileno())
        return {"wall_seconds": self.clock() - self.started, "evaluation_seconds": self.evaluation_seconds}

    def advance(self, step: int, images: int, data_seconds: float = 0.0) -> None:
        """After every step; waits for no device. Images of all ranks in it, seconds it waited for data."""
        if not self.active:
            return
        self.step = step
        self.throughput.step(images, data_seconds)
        self._refresh_bar()

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Time inside is evaluation: left out of the throughput, expected again in the time left."""
        start = self.clock()
        try:
            yield
        finally:
            self.evaluation_seconds.append(self.clock() - start)
            self.throughput.excluded += self.evaluation_seconds[-1]

    def log_train(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Writes the metrics of a step, numbers or 0-d tensors, and warns of collapse. It may come late.

        `images_per_second`, `data_wait_share` and `memory_gib` are added here.
        """
        if not self.active:
            return
        self.step = max(self.step, step)
        numbers, odd = _numbers({"memory_gib": memory_gib(), **self.throughput.recent(), **metrics})
        self._event("train", step, numbers)
        self._scalars("train", step, numbers)
        self.latest |= {name: value for name, value in numbers.items() if value is not None}
        self.phase_sums.update({name: numbers[name] for name in PHASE_METRICS if name in numbers})
        self.reported_steps += 1
        if odd:
            self._warn_non_finite(step, odd)
        if message := self.collapse.check(step, numbers):
            self.warn(message, step)
        self._refresh_bar()
        if self.progress is None and (self.clock() - self.last_line >= PLAIN_SECONDS or step == self.total_steps):
            self.last_line = self.clock()
            digits = len(str(self.total_steps))
            place = f"step {step:>{digits}}/{self.total_steps}  epoch {self._epoch(step):7.2f}"
            self.say(f"{place}  {_columns(numbers)}  left {_duration(self._seconds_left()):>9}")

    def log_knn(self, step: int, result: KNNResult) -> None:
        """Writes and shows the kNN accuracy of the online backbone after a step, with its settings."""
        if not self.active:
            return
        self.step = max(self.step, step)
        top5 = {} if result.top5 is None else {"top5": result.top5}
        settings = {
            "k": result.k,
            "temperature": result.temperature,
            "protocol": PROTOCOL,
            "branch": BRANCH,
        }
        self._event("knn", step, {"accuracy": result.accuracy, **top5, **settings})
        self._scalars("knn", step, {"accuracy": result.accuracy, **top5})
        self.accuracies.append((step, result.accuracy))
        first = f", {self.accuracies[0][1]:.2f} % at step {self.accuracies[0][0]}" if len(self.accuracies) > 1 else ""
        self.say(
            f"epoch {self._epoch(step):.2f}  kNN accuracy {result.accuracy:.2f} %{first}"
            f"  (weighted kNN, k {result.k}, T {result.temperature:g}, online backbone)"
        )

    def warn(self, message: str, step: int | None = None) -> None:
        """Shows a warning that nobody overlooks and records it as an event, by default of the latest step."""
        if not self.active:
            return
        self._event("warning", self.step if step is None else step, {"message": message})
        self._log(f"WARNING: {message}")
        if self.progress is None:
            self._print(f"WARNING: {message}")
        else:
            self.console.print(Panel(Text(message), title="Warning", title_align="left", border_style="bold yellow"))

    def say(self, message: str) -> None:
        """Shows a line on the console, above the progress bar, and records it in the log."""
        if not self.active:
            return
        self._log(message)
        self._print(message)

    def finish(self, summary: Mapping[str, Any] | None = None, next_commands: Sequence[str] = ()) -> dict[str, Any]:
        """Shows the final table and the commands to type next; writes summary.json and returns what it holds.

        summary: further entries, each a row of the table (percent where the name begins with knn_), or other
            values for the telemetry's own.
        """
        if not self.active:
            return {}
        accuracies = [accuracy for _, accuracy in self.accuracies]
        own = {
            "steps": self.step,
            "epochs": self._epoch(self.step),
            **{name: self.latest.get(name) for name in ("loss", "positive_cosine", "feature_std", "effective_rank")},
            "knn_first": accuracies[0] if accuracies else None,
            "knn_last": accuracies[-1] if accuracies else None,
            "knn_best": max(accuracies, default=None),
            "images_per_second": self.throughput.overall(),
            "evaluation_seconds": sum(self.evaluation_seconds),
            "wall_seconds": self.clock() - self.started,
        }
        numbers, _ = _numbers(own | dict(summary or {}))
        text = json.dumps(numbers, allow_nan=False, indent=2)
        (self.run_dir / "summary.json").write_text(text + "\n", encoding="utf-8")
        self._log(f"finished: {json.dumps(numbers, allow_nan=False)}")
        if self.progress is not None:
            self.progress.stop()
        self.console.print(self._table(numbers, further=[name for name in summary or {} if name not in own]))
        if next_commands:
            self._print("Next:")
            for command in next_commands:
                self._print(f"  {command}")
        return numbers

    def _table(self, numbers: Mapping[str, Any], further: Sequence[str]) -> Table:
        def show(name: str, form: str, unit: str = "") -> str:
            return "–" if numbers[name] is None else f"{numbers[name]:{form}}{unit}"

        rows = [
            ("steps, epochs", f"{show('steps', 'd')}, {show('epochs', '.4g')}"),
            ("final loss", show("loss", ".4f")),
            ("positive cosine", show("positive_cosine", ".4f")),
            ("feature std (healthy: 1)", show("feature_std", ".3f")),
            ("effective rank of F", show("effective_rank", ".1f")),
        ]
        if numbers["knn_first"] is None:
            rows.append(("kNN accuracy", "not evaluated"))
        else:
            first, last, best = (show(f"knn_{which}", ".2f", " %") for which in ("first", "last", "best"))
            rows.append(("kNN accuracy, first → last", f"{first} → {last} (best {best})"))
        for name in further:
            value = numbers[name]
            form, unit = (".2f", " %") if name.startswith("knn_") else (".4g", "")
            label = name.replace("knn_", "kNN ").replace("_", " ")
            rows.append((label, f"{value:{form}}{unit}" if isinstance(value, float) else str(value)))
        evaluation = _duration(numbers["evaluation_seconds"])
        rows += [
            ("images/s, training", show("images_per_second", ".1f")),
            *([("milliseconds per step", self._phases())] if self.phase_sums else []),
            ("wall time", f"{_duration(numbers['wall_seconds'])} (evaluation {evaluation})"),
            ("files", "\n".join([f"{self.run_dir}/", *(f"  {name}" for name in self._files())])),
        ]
        table = Table(title="Pretraining finished", title_justify="left", show_header=False)
        for row in rows:
            table.add_row(*map(Text, row))  # as it is: a folder's name may look like markup
        return table

    def _phases(self) -> str:
        """Mean milliseconds of each phase of a step, in the order of the step."""
        means = {name: total / self.reported_steps for name, total in self.phase_sums.items()}
        parts = [f"{name.removeprefix('ms_').replace('_', ' ')} {mean:.1f}" for name, mean in means.items()]
        return ",\n".join(", ".join(parts[first : first + 3]) for first in range(0, len(parts), 3))

    def _files(self) -> list[str]:
        return sorted(
            path.name + "/" * path.is_dir() for path in self.run_dir.iterdir() if not path.name.startswith(".")
        )

    def _event(self, event: str, step: int, fields: Mapping[str, Any]) -> None:
        line = {"event": event, "step": step, "epoch": self._epoch(step), **fields}
        self.metrics_file.write(json.dumps(line, allow_nan=False) + "\n")
        self.metrics_file.flush()

    def _scalars(self, group: str, step: int, numbers: Mapping[str, Any]) -> None:
        if self.tensorboard is not None:
            for name, value in numbers.items():
                if value is not None:
                    self.tensorboard.add_scalar(f"{group}/{name}", value, step)

    def _warn_non_finite(self, step: int, odd: Mapping[str, str]) -> None:
        """Every occasion is an event; the console is told once per metric."""
        message = f"non-finite at step {step}, written as null: " + ", ".join(f"{k} = {v}" for k, v in odd.items())
        if odd.keys() <= self.named_non_finite:
            self._event("warning", step, {"message": message})
            self._log(f"WARNING: {message}")
        else:
            self.named_non_finite |= odd.keys()
            self.warn(message, step)

    def _refresh_bar(self) -> None:
        if self.progress is not None:
            self.progress.update(
                self.task,
                completed=self.step,
                epoch=self._epoch(self.step),
                left=_duration(self._seconds_left()),
                values=_columns(self.latest | self.throughput.recent(), fixed=False),
            )

    def _seconds_left(self) -> float | None:
        """Remaining steps at the recent pace, and the evaluations that lie among them."""
        per_step = self.throughput.seconds_per_step()
        if per_step is None:
            return None
        left = self.total_steps - self.step
        every = self.config.evaluation.every * self.steps_per_epoch or self.total_steps
        evaluations = math.ceil(left / every)
        each = sum(self.evaluation_seconds) / max(len(self.evaluation_seconds), 1)
        return left * per_step + evaluations * each

    def _epoch(self, step: int) -> float:
        return step / self.steps_per_epoch

    def _log(self, message: str) -> None:
        self.log_file.write(f"{datetime.now().isoformat(sep=' ', timespec='seconds')}  {message}\n")

    def _print(self, message: str) -> None:
        self.console.print(message, soft_wrap=True, markup=False, highlight=False)


def memory_gib() -> float:
    """Most memory in use so far, GiB: of the CUDA allocator where CUDA runs, else of the process."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)  # bytes on macOS, KiB elsewhere


def _numbers(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The values as JSON takes them, non-finite ones as None, and those by name."""
    numbers, odd = {}, {}
    for name, value in values.items():
        value = value.item() if hasattr(value, "item") else value  # a 0-d tensor or a NumPy number
        if isinstance(value, float) and not math.isfinite(value):
            odd[name] = str(value)
            value = None
        numbers[name] = str(value) if isinstance(value, Path) else value
    return numbers, odd


def _columns(numbers: Mapping[str, float | None], fixed: bool = True) -> str:
    """The values of COLUMNS in one line: each at its width, or only those that a terminal has room for."""
    if fixed:
        return "  ".join(
            f"{label} {'–' if numbers.get(name) is None else format(numbers[name], form):>{width}}"
            for name, label, form, width in COLUMNS
        )
    short = {"loss", "positive_cosine", "images_per_second", "data_wait_share"}
    return "  ".join(
        f"{label} {format(numbers[name], form)}"
        for name, label, form, _ in COLUMNS
        if name in short and numbers.get(name) is not None
    )


def _duration(seconds: float | None) -> str:
    """Hours, minutes and seconds, as in 1:02:03."""
    if seconds is None:
        return "?"
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"
