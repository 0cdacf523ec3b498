"""The numbers of a comparison's pictures, over seeds, and as CSV."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, TypeAlias

from unigrad_fast.comparison.figures import Over, Row
from unigrad_fast.comparison.paper_values import Line
from unigrad_fast.training.telemetry.curves import PANELS
from unigrad_fast.training.telemetry.events import read_events

MOST_POINTS = 100  # of a curve
Reports: TypeAlias = dict[int, tuple[float, float]]  # epoch and value by step
Values: TypeAlias = list[list[Any]]  # the lines of a CSV file, its head first


@dataclass(frozen=True)
class Point:
    """A metric of a line: step and epoch, and the value of each seed."""

    step: float
    epoch: float
    over: Over


@dataclass(frozen=True)
class Curve:
    """A metric of a line during training, over the seeds that ended.

    Attributes:
        place: that of the line in the comparison.
        line, metric: of what.
        points: in the order of the steps. Of more than `MOST_POINTS` reports consecutive ones are averaged.
    """

    place: int
    line: Line
    metric: str
    points: Sequence[Point]


def curves(rows: Sequence[Row], metrics: Sequence[str]) -> list[Curve]:
    """All curves that have a finite value, line by line."""
    found = []
    for place, row in enumerate(rows):
        runs = {seed: _reports(row.runs[seed], metrics) for seed, at in row.ended.items() if at.figures}
        for metric in metrics:
            reports = {seed: run[metric] for seed, run in runs.items() if run[metric]}
            if reports:
                found.append(Curve(place, row.line, metric, _points(reports)))
    return found


def _reports(run: Path, metrics: Sequence[str]) -> dict[str, Reports]:
    """The finite values of a run's metrics."""
    found: dict[str, Reports] = {metric: {} for metric in metrics}
    for event in read_events(run):
        for metric in metrics:
            kind = PANELS[metric][0] if metric in PANELS else "train"
            if event["event"] == kind and event.get(metric) is not None:
                found[metric][event["step"]] = event["epoch"], event[metric]
    return found


def _points(reports: dict[int, Reports]) -> list[Point]:
    epochs = {step: epoch for run in reports.values() for step, (epoch, _) in run.items()}
    steps = sorted(epochs)
    size = math.ceil(len(steps) / MOST_POINTS)
    found = []
    for window in (steps[first : first + size] for first in range(0, len(steps), size)):
        values = {seed: [run[step][1] for step in window if step in run] for seed, run in reports.items()}
        over = Over({seed: fmean(each) for seed, each in values.items() if each})
        found.append(Point(fmean(window), fmean(epochs[step] for step in window), over))
    return found


def of_curves(found: Iterable[Curve]) -> Values:
    """A line for each point."""
    return [
        ["row", "column", "metric", "step", "epoch", "mean", "deviation", "seeds"],
        *(
            [*_named(curve.line), curve.metric, point.step, point.epoch, *_cells(point.over)]
            for curve in found
            for point in curve.points
        ),
    ]


def of_accuracies(rows: Sequence[Row], figures: Sequence[str]) -> Values:
    """A line for each figure of each line that has it."""
    return [
        ["row", "column", "figure", "mean", "deviation", "seeds"],
        *(
            [*_named(row.line), name, *_cells(row.over(name))]
            for name in figures
            for row in rows
            if row.over(name).values
        ),
    ]


@dataclass(frozen=True)
class Payment:
    """What a line cost and gave: minutes of training and accuracy of the seeds that have both."""

    place: int
    line: Line
    minutes: Over
    accuracy: Over


def payments(rows: Sequence[Row], figure: str) -> list[Payment]:
    """Those of all lines that have the figure."""
    found = []
    for place, row in enumerate(rows):
        accuracy = row.over(figure)
        minutes = Over({seed: row.ended[seed].minutes for seed in accuracy.values})
        if accuracy.values:
            found.append(Payment(place, row.line, minutes, accuracy))
    return found


def of_payments(found: Iterable[Payment], figure: str) -> Values:
    return [
        ["row", "column", "minutes mean", "minutes deviation", f"{figure} mean", f"{figure} deviation", "seeds"],
        *([*_named(each.line), *_cells(each.minutes)[:2], *_cells(each.accuracy)] for each in found),
    ]


def _named(line: Line) -> list[str]:
    return [line.row, line.column]


def _cells(over: Over) -> list[float | int | None]:
    return [over.mean, over.deviation, len(over.values)]
