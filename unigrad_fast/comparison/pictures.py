"""Pictures of a comparison, as PNG and SVG, each beside a CSV file with its numbers.

Trajectories and justifications are the panels of the paper's figures "Learning trajectory for different methods" and
"Justifications for simplifications". A line of the comparison has the same colour and marker in all pictures.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from unigrad_fast.comparison import series
from unigrad_fast.comparison.figures import KNN, Row
from unigrad_fast.comparison.series import Curve, Values
from unigrad_fast.comparison.tables import Comparison
from unigrad_fast.evaluation.charts import COLOURS, plain_text
from unigrad_fast.pipelines.scan.files import as_csv
from unigrad_fast.runtime.files import write_whole
from unigrad_fast.runtime.plotting import plotting
from unigrad_fast.runtime.wording import count
from unigrad_fast.training.telemetry.curves import (
    DASHED,
    DOTTED,
    GRAY,
    PANELS,
    limit_accuracy,
    settle,
    style_axes,
    write_figure,
)

with plotting():
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

TRAJECTORIES = ("positive_cosine", "negative_cosine", "accuracy", "principal_components")
JUSTIFICATION = (
    *("correlation_term", "term_cosine", "dynamic_balance"),
    *("greatest_diagonal", "neglected_cosine", "second_term_ratio"),
)
MARKERS = "osD^vP*X<>"
DASHES = ("-", "--", ":", "-.")
MARKED = 8  # points of a curve that have a marker
MOST_DRAWN = 20  # lines of the comparison with curves
LONGEST = 34  # characters of a line of a name


@dataclass(frozen=True)
class Picture:
    """A figure and the numbers that it shows."""

    figure: Figure
    values: Values


@plotting()
def draw(of: Comparison, paths: Mapping[str, Path], images: int | None) -> list[Path]:
    """Draw what there are numbers for; returns the paths of the PNG files.

    Args:
        paths: of each picture's PNG file, by name; SVG and CSV are written beside it.
        images: number of validation images, if it is known.
    """
    makers = {"trajectories": _trajectories, "justification": _justification, "accuracy": _bars, "minutes": _minutes}
    written = []
    for name, make in makers.items():
        picture = make(of)
        if picture is not None:
            _title(picture.figure, of, images)
            settle(picture.figure)
            written.append(write_figure(picture.figure, paths[name]))
            write_whole(paths[name].with_suffix(".csv"), as_csv(picture.values))
    return written


def _trajectories(of: Comparison) -> Picture | None:
    return _panels(of, TRAJECTORIES, is_dashed=True)


def _justification(of: Comparison) -> Picture | None:
    """Here dashes tell the terms of a panel apart."""
    return _panels(of, JUSTIFICATION, is_dashed=False)


def _panels(of: Comparison, names: Sequence[str], is_dashed: bool) -> Picture | None:
    """A panel for each metric that a member has."""
    others = [shared[name] for shared in (DASHED, DOTTED) for name in names if name in shared]
    found = series.curves(of.rows, [*names, *others])
    panels = [name for name in names if any(curve.metric == name for curve in found)]
    if not panels:
        return None
    shown = sorted({curve.place for curve in found})[:MOST_DRAWN]
    columns = 2 if len(panels) == 4 else min(len(panels), 3)
    rows = math.ceil(len(panels) / columns)
    figure = _figure(4.4 * columns + 2.6, max(3.5 * rows + 0.7, _height(len(shown))))
    places = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in places[len(panels) :]:
        axes.remove()
    end = max(curve.points[-1].epoch for curve in found) or 1
    for name, axes in zip(panels, places, strict=False):
        style_axes(axes, PANELS[name][1])
        axes.set_xlim(-0.02 * end, 1.02 * end)
        for metric, dash in ((name, "-"), (DASHED.get(name), "--"), (DOTTED.get(name), ":")):
            for curve in found:
                if curve.metric == metric and curve.place in shown:
                    _draw(axes, curve, _dash(curve.place) if is_dashed else dash)
        if name == "accuracy":
            limit_accuracy(axes)
    _legend(figure, of, shown, is_dashed)
    return Picture(figure, series.of_curves(found))


def _draw(axes: Axes, curve: Curve, dash: str) -> None:
    """The mean over seeds, in a band of their deviation."""
    epochs, means, deviations = (
        np.array(each, float)
        for each in zip(*((point.epoch, point.over.mean, point.over.deviation) for point in curve.points), strict=True)
    )
    color, marker = _look(curve.place)
    every = max(1, len(epochs) // MARKED)
    axes.fill_between(epochs, means - deviations, means + deviations, color=color, alpha=0.18, linewidth=0)
    axes.plot(
        epochs,
        means,
        color=color,
        linestyle=dash,
        linewidth=1.6,
        marker=marker,
        markersize=6.5,
        markeredgecolor="white",
        markeredgewidth=0.5,
        markevery=(curve.place % every, every),  # not where the next line has its own
    )


def _bars(of: Comparison) -> Picture | None:
    """A panel for each figure, with a bar for the mean, a whisker for the deviation and a point for each seed."""
    names = [name for name in of.columns if any(row.over(name).values for row in of.rows)]
    if not names:
        return None
    rows = [(place, row) for place, row in enumerate(of.rows) if any(row.over(name).values for name in names)]
    figure = _figure(2.6 + 4.6 * len(names), 1.7 + 0.36 * len(rows))
    for axes, name in zip(figure.subplots(1, len(names), sharey=True, squeeze=False).flat, names, strict=True):
        _style(axes, f"{name} accuracy, %", "x")
        for height, (place, row) in enumerate(rows):
            over = row.over(name)
            if not over.values:
                continue
            axes.barh(height, over.mean, height=0.66, color=_look(place)[0], alpha=0.75)
            _whiskers(axes, over.mean, height, xerr=over.deviation)
            axes.plot(list(over.values.values()), [height + 0.2] * len(over.values), **SEED)
            text = f"{over.mean:.2f}" + ("" if over.deviation is None else f" ± {over.deviation:.2f}")
            _right(axes, height, f"{text}  ({count(len(over.values), 'seed')})")
        if name == KNN and (untrained := of.untrained()):
            axes.axvline(fmean(untrained), color=GRAY, linewidth=1.2, linestyle=":")
            axes.set_xlabel(f"dotted: untrained encoder, {fmean(untrained):.2f}", fontsize=9, color=GRAY)
        axes.set_xlim(left=0)  # last: it ends the scaling to what is drawn
        axes.set_yticks(range(len(rows)), [_wrapped(str(row.line)) for _, row in rows], fontsize=9.5)
        axes.set_ylim(len(rows) - 0.5, -0.5)
    return Picture(figure, series.of_accuracies(of.rows, names))


def _minutes(of: Comparison) -> Picture | None:
    """Means over seeds, with whiskers for both deviations."""
    found = series.payments(of.rows, of.judged_by)
    shown = found[:MOST_DRAWN]
    if not found:
        return None
    figure = _figure(9.2, max(5.0, _height(len(shown))))
    axes = figure.subplots()
    _style(axes, f"{of.judged_by} accuracy, %", "both")
    axes.set_xlabel("minutes of training per run, without evaluation", fontsize=9)
    for each in shown:
        color, marker = _look(each.place)
        x, y = each.minutes.mean, each.accuracy.mean
        _whiskers(axes, x, y, xerr=each.minutes.deviation, yerr=each.accuracy.deviation, ecolor=color)
        axes.plot([x], [y], color=color, marker=marker, markersize=9, markeredgecolor="white", zorder=4)
    axes.margins(0.1)
    axes.set_xlim(0, 1.1 * max(each.minutes.mean + (each.minutes.deviation or 0) for each in shown))
    limit_accuracy(axes)
    _legend(figure, of, [each.place for each in shown], is_dashed=None)
    return Picture(figure, series.of_payments(found, of.judged_by))


SEED = {"linestyle": "", "marker": "o", "markersize": 4, "color": "white", "markeredgecolor": "black", "zorder": 3}


def _whiskers(axes: Axes, x: float, y: float, **style: Any) -> None:
    errors = {"ecolor": "black", **{key: value for key, value in style.items() if value is not None}}
    axes.errorbar(x, y, fmt="none", elinewidth=1.2, capsize=3, zorder=2, **errors)


def _right(axes: Axes, height: float, text: str) -> None:
    axes.annotate(
        text,
        (1, height),
        xycoords=("axes fraction", "data"),
        xytext=(5, 0),
        textcoords="offset points",
        va="center",
        fontsize=9,
        annotation_clip=False,
    )


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), dpi=130, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.08, wspace=0.02)
    return figure


def _style(axes: Axes, title: str, grid: str) -> None:
    style_axes(axes, title)
    axes.grid(visible=False)
    axes.grid(axis=grid, color="#e6e6e6", linewidth=0.8)
    axes.set_xlabel("")


def _look(place: int) -> tuple[str, str]:
    """Colour and marker of a line; from the eleventh on colours come again, with another marker."""
    again, number = divmod(place, len(COLOURS))
    return COLOURS[number], MARKERS[(number + 5 * again) % len(MARKERS)]


def _dash(place: int) -> str:
    return DASHES[(place + place // 20) % len(DASHES)]  # after 20 lines colours and markers come again


def _legend(figure: Figure, of: Comparison, places: Sequence[int], is_dashed: bool | None) -> None:
    """Names of lines with their numbers of seeds; `is_dashed` is None where they have a marker alone."""
    handles, texts = [], []
    for place in places:
        color, marker = _look(place)
        dash = "" if is_dashed is None else _dash(place) if is_dashed else "-"
        handles.append(Line2D([], [], color=color, linestyle=dash, marker=marker, markersize=7))
        row = of.rows[place]
        texts.append(_wrapped(f"{row.line}\N{NO-BREAK SPACE}({_seeds(row)})"))
    figure.legend(
        handles,
        texts,
        loc="outside right center",
        frameon=False,
        fontsize=9,
        handlelength=1.2 if is_dashed is None else 3.4,
        title="line (seeds)",
        title_fontsize=9,
        alignment="left",
    )


def _seeds(row: Row) -> int:
    """How many ended."""
    return sum(bool(at.figures) for at in row.ended.values())


def _height(lines: int) -> float:
    """Inches for a legend and the title."""
    return 1.2 + 0.26 * lines


def _title(figure: Figure, of: Comparison, images: int | None) -> None:
    one = all(_seeds(row) < 2 for row in of.rows)
    about = ["one seed" if one else "mean over seeds ± standard deviation of a sample"]
    if images is not None:
        about.append(count(images, "validation image"))
    if sum(bool(_seeds(row)) for row in of.rows) > MOST_DRAWN:
        about.append(f"at most {MOST_DRAWN} lines with curves; all are in the .csv")
    width = int(figure.get_figwidth() * 10.5)
    lines = [
        line
        for part in (of.title, ", ".join(about))
        for line in textwrap.wrap(plain_text(part), width, break_on_hyphens=False)
    ]
    figure.suptitle("\n".join(lines), x=0.01, ha="left", fontsize=10.5, fontweight="bold")


def _wrapped(name: str) -> str:
    return "\n".join(textwrap.wrap(plain_text(name), LONGEST))
