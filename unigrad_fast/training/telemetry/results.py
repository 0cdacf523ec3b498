"""Results of a run: the numbers in RUN/summary.json, and the table printed at its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from unigrad_fast.runtime.console import fitted
from unigrad_fast.training.telemetry.phases import PHASES
from unigrad_fast.training.telemetry.progress import duration


class Results:
    """The latest metrics, the accuracies, and the times of a step's phases.

    Attributes:
        latest: the latest finite value of each training metric.
        accuracies: (step, percent) of each kNN evaluation.
    """

    def __init__(self) -> None:
        self.latest: dict[str, float] = {}
        self.accuracies: list[tuple[int, float]] = []
        self.phase_sums: Counter[str] = Counter()  # milliseconds of the reported steps
        self.reported_steps = 0

    def add_step(self, numbers: Mapping[str, Any]) -> None:
        """Add the metrics of a reported step, with the times of its phases."""
        self._keep_finite(numbers)
        self.phase_sums.update({phase: numbers[f"ms_{phase}"] for phase in PHASES if f"ms_{phase}" in numbers})
        self.reported_steps += 1

    def remember(self, event: Mapping[str, Any]) -> None:
        """Take over an event of an earlier process."""
        if event["event"] == "train":
            self._keep_finite({name: value for name, value in event.items() if name not in ("event", "step", "epoch")})
        elif event["event"] == "knn":
            self.accuracies.append((event["step"], event["accuracy"]))

    def final(self) -> dict[str, float | None]:
        """The summary's entries for metrics and accuracies."""
        accuracies = [accuracy for _, accuracy in self.accuracies]
        return {
            **{name: self.latest.get(name) for name in ("loss", "positive_cosine", "feature_std", "effective_rank")},
            "knn_first": accuracies[0] if accuracies else None,
            "knn_last": accuracies[-1] if accuracies else None,
            "knn_best": max(accuracies, default=None),
        }

    def accuracy(self) -> tuple[str, str]:
        """The summary's row of the kNN accuracies."""
        values = [f"{accuracy:.2f} %" for _, accuracy in self.accuracies]
        if len(values) < 2:
            return "kNN accuracy", values[0] if values else "not evaluated"
        best = max(accuracy for _, accuracy in self.accuracies)
        return "kNN accuracy, first → last", f"{values[0]} → {values[-1]} (best {best:.2f} %)"

    def phases(self) -> str:
        """Mean milliseconds of each phase of a step, in the order of the step."""
        means = {phase: total / self.reported_steps for phase, total in self.phase_sums.items()}
        return _listed([f"{phase.replace('_', ' ')} {mean:.1f}" for phase, mean in means.items()])

    def _keep_finite(self, numbers: Mapping[str, Any]) -> None:
        self.latest |= {name: value for name, value in numbers.items() if value is not None}


def final_table(numbers: Mapping[str, Any], further: Sequence[str], results: Results, run_dir: Path) -> Table:
    """The summary as a table, results first, then the run's files; counts of 0 are omitted.

    Args:
        numbers: the summary.
        further: names of its entries that are not the telemetry's own, one row each.
        results: what the summary was made of.
    """

    def show(name: str, form: str, unit: str = "") -> str:
        return "–" if numbers[name] is None else f"{numbers[name]:{form}}{unit}"

    rows = [
        results.accuracy(),
        ("steps, epochs", f"{show('steps', 'd')}, {show('epochs', '.4g')}"),
        ("final loss", show("loss", ".4f")),
        ("positive cosine", show("positive_cosine", ".4f")),
        ("feature std (healthy: 1)", show("feature_std", ".3f")),
    ]
    if numbers["effective_rank"] is not None:  # the method keeps F
        rows.append(("effective rank of F", show("effective_rank", ".1f")))
    for name in further:
        value = numbers[name]
        if value == 0 and isinstance(value, int):  # nothing went wrong
            continue
        form, unit = (".2f", " %") if name.startswith("knn_") else (".4g", "")
        label = name.replace("knn_", "kNN ").replace("_", " ")
        rows.append((label, f"{value:{form}}{unit}" if isinstance(value, float) else str(value)))
    phases = results.phases()
    evaluation = duration(numbers["evaluation_seconds"])
    files = sorted(path.name + "/" * path.is_dir() for path in run_dir.iterdir() if not path.name.startswith("."))
    rows += [
        ("images/s, training", show("images_per_second", ".1f")),
        *([("milliseconds per step", phases)] if phases else []),
        ("wall time", f"{duration(numbers['wall_seconds'])} (evaluation {evaluation})"),
        ("files", f"{run_dir}/\n{_listed(files)}"),
    ]
    ended = "stopped" if "stopped_by" in numbers else "finished"
    table = Table(title=f"Pretraining {ended}", title_justify="left", show_header=False)
    for row in rows:
        table.add_row(*(Text(fitted(cell)) for cell in row))  # without markup: a folder's name may look like it
    return table


def _listed(parts: Sequence[str]) -> str:
    """Comma-separated, three per line."""
    return ",\n".join(", ".join(parts[first : first + 3]) for first in range(0, len(parts), 3))
