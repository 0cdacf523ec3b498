"""What the members ended with, and which differences between lines exceed those between seeds.

A difference between two lines is that of runs with the same seed, which begin with the same backbone and see the same
images in the same order. Its interval is Student's t, at 95 %: mean ± t·s/√n over the n seeds that both have, where s
is the deviation of the n differences.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from unigrad_fast.comparison.folder import ComparisonFolder
from unigrad_fast.comparison.members import Member
from unigrad_fast.comparison.paper_values import DETECTION, FEW, LINEAR, Line
from unigrad_fast.runtime.run_folder import RunFolder

KNN = "kNN"
CONFIDENCE = 0.95
LEAST_SEEDS = 3  # with two, an interval is a matter of luck: accuracies are multiples of one image
# The order of two lines beside the paper's: the difference exceeds those between seeds, does not, or has too few seeds.
VERDICTS = (
    AGREES := "as in the paper",
    CONTRADICTS := "in the other order",
    UNDECIDED := "within the differences between seeds",
    SAME := "as in the paper, too few seeds",
    OTHER := "not as in the paper, too few seeds",
)


@dataclass(frozen=True)
class Figure:
    """A number of a member that an evaluation gives.

    Attributes:
        name: in tables.
        evaluation: what follows `evaluate` in the command that measures it on RUN; None for the run's own.
        file: the start of the result's name.
        entry: its entry there.
        settings: entries that the result must have.
    """

    name: str
    evaluation: tuple[str, ...] | None
    file: str = ""
    entry: str = "accuracy"
    settings: tuple[tuple[str, Any], ...] = ()


def _finetuned(name: str) -> Figure:
    share, _, entry = name.partition(" % top-")
    fraction = int(share) / 100
    command = ("finetune", "RUN", "--fraction", f"{fraction:g}")
    return Figure(name, command, "finetune-", "accuracy" if entry == "1" else "top5", (("fraction", fraction),))


FIGURES = {
    figure.name: figure
    for figure in (
        Figure(KNN, None),
        Figure(LINEAR, ("linear", "RUN", "--protocol", "paper"), "linear-paper-"),
        Figure("linear, sweep", ("linear", "RUN", "--protocol", "sweep"), "linear-sweep-"),
        Figure("linear, quick", ("linear", "RUN"), "linear-quick-"),
        *map(_finetuned, FEW),
    )
}
ALWAYS = (KNN, LINEAR)  # columns of every table; the others only where the table or a member has them
BEST_FIRST = (LINEAR, "linear, sweep", "linear, quick", KNN)  # the first that all members have orders the lines


@dataclass(frozen=True)
class Ended:
    """How far a member is.

    Attributes:
        figures: its numbers by name.
        failure: why it has none; None if it ended, or has not ended yet.
        done: it ended, and is not trained again.
        untrained: kNN accuracy before the first step.
        minutes: of training, without evaluation.
    """

    figures: Mapping[str, float]
    failure: str | None = None
    done: bool = False
    untrained: float | None = None
    minutes: float | None = None


def ended(member: Member, folder: ComparisonFolder) -> Ended:
    """How far a member is, by its folder."""
    from unigrad_fast.evaluation.results import read_results

    run = RunFolder(member.config.output)
    summary: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        summary = json.loads(run.summary.read_text(encoding="utf-8"))
    if not summary:
        return Ended({}, folder.failure(member))
    if summary["skipped_steps"] >= summary["steps"] > 0:
        return Ended({}, "all steps had NaN or infinite values and were dropped", done=True)
    found = {} if summary["knn_last"] is None else {KNN: summary["knn_last"]}
    results = read_results(run.path)
    for figure in FIGURES.values():
        if (value := _read(figure, results, summary["epochs"])) is not None:
            found[figure.name] = value
    untrained = summary["knn_first"] if member.config.evaluation.at_start else None
    minutes = (summary["wall_seconds"] - summary["evaluation_seconds"]) / 60
    return Ended(found, done=True, untrained=untrained, minutes=minutes)


def _read(figure: Figure, results: Mapping[str, Mapping[str, Any]], epochs: float) -> float | None:
    """The value in the first result of the last checkpoint; None without one."""
    for name, content in results.items():
        fits = all(content.get(key) == value for key, value in figure.settings)
        if figure.file and name.startswith(figure.file) and content.get("epoch") == epochs and fits:
            value = content.get(figure.entry)
            if isinstance(value, int | float) and math.isfinite(value):
                return float(value)
    return None


@dataclass(frozen=True)
class Over:
    """A figure of a line over seeds: values by seed, in the order of the seeds."""

    values: Mapping[int, float]

    @property
    def mean(self) -> float | None:
        return fmean(self.values.values()) if self.values else None

    @property
    def deviation(self) -> float | None:
        """Standard deviation of a sample."""
        return stdev(self.values.values()) if len(self.values) > 1 else None


@dataclass(frozen=True)
class Row:
    """A line of the comparison with what its members ended with.

    Attributes:
        line: the line.
        runs: the members' folders by seed; none if nothing is trained.
        ended: by seed, as far as each is.
    """

    line: Line
    runs: Mapping[int, Path]
    ended: Mapping[int, Ended]

    def over(self, figure: str) -> Over:
        return Over({seed: each.figures[figure] for seed, each in self.ended.items() if figure in each.figures})

    def failures(self) -> dict[int, str]:
        return {seed: each.failure for seed, each in self.ended.items() if each.failure is not None}

    def unfinished(self) -> list[int]:
        return [seed for seed, each in self.ended.items() if not each.done and each.failure is None]


@dataclass(frozen=True)
class Difference:
    """The difference of a figure between two lines.

    Attributes:
        one, other: the lines.
        seeds: number of seeds that both have.
        mean: mean of one − other over these.
        half: half of the width of its interval; None with fewer than `LEAST_SEEDS`.
        paper: the same difference in the paper; None if it does not have both.
    """

    one: Line
    other: Line
    seeds: int
    mean: float
    half: float | None
    paper: float | None

    @property
    def exceeds(self) -> bool | None:
        """Whether its interval excludes 0; None without one."""
        return None if self.half is None else abs(self.mean) > self.half

    @property
    def verdict(self) -> str | None:
        """One of `VERDICTS`; None if the paper does not order the lines."""
        if not self.paper:
            return None
        same = self.mean * self.paper > 0
        if self.exceeds is None:
            return SAME if same else OTHER
        return (AGREES if same else CONTRADICTS) if self.exceeds else UNDECIDED


def differences(rows: Sequence[Row], figure: str, reported: str) -> list[Difference]:
    """All pairs of lines that have the figure with a common seed.

    Args:
        reported: the paper's figure that orders its lines.
    """
    found = []
    for place, one in enumerate(rows):
        for other in rows[place + 1 :]:
            first, second = one.over(figure).values, other.over(figure).values
            seeds = [seed for seed in first if seed in second]
            if not seeds or one.runs == other.runs:
                continue
            each = [first[seed] - second[seed] for seed in seeds]
            half = None
            if len(each) >= LEAST_SEEDS:
                half = t_quantile(len(each) - 1) * stdev(each) / math.sqrt(len(each))
            papers = one.line.paper.get(reported), other.line.paper.get(reported)
            paper = None if None in papers else round(papers[0] - papers[1], 9)
            found.append(Difference(one.line, other.line, len(each), fmean(each), half, paper))
    return found


def judging(rows: Sequence[Row], reported: Sequence[str]) -> str:
    """The figure that orders the lines: the best one that every member that ended has.

    Args:
        reported: figures of the paper's table.
    """
    all_ended = [each for row in rows for each in row.ended.values() if each.figures]
    candidates = (*reported, *BEST_FIRST) if all_ended else ()
    return next((name for name in candidates if all(name in each.figures for each in all_ended)), KNN)


@cache
def t_quantile(freedom: int, confidence: float = CONFIDENCE) -> float:
    """The t that |T| of Student's distribution exceeds with probability 1 − confidence; solved to rounding."""
    low, high = 0.0, 1.0
    while _within(high, freedom) < confidence:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < confidence else (low, middle)
    return high


def _within(t: float, freedom: int) -> float:
    """P(|T| < t), Abramowitz and Stegun 26.7.3 and 26.7.4."""
    angle = math.atan(t / math.sqrt(freedom))
    odd = freedom % 2
    term = math.cos(angle) if odd else 1.0
    total = term if freedom > 1 else 0.0
    for number in range(2 + odd, freedom - 1, 2):
        term *= math.cos(angle) ** 2 * (number - 1) / number
        total += term
    return 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total


def missing(rows: Sequence[Row], figure: str) -> list[Path]:
    """Runs that ended without a figure."""
    every = [(row.runs[seed], at) for row in rows for seed, at in row.ended.items()]
    return list(dict.fromkeys(run for run, at in every if at.done and at.failure is None and figure not in at.figures))


def columns(rows: Sequence[Row], reported: Sequence[str]) -> list[str]:
    """The figures that a table of these lines shows.

    Args:
        reported: figures of the paper's table.
    """
    there = {name for row in rows for each in row.ended.values() for name in each.figures}
    wanted = (KNN, *reported) if set(reported) <= {*FEW, *DETECTION} else ALWAYS
    return list(dict.fromkeys([*wanted, *(name for name in FIGURES if name in there)]))
