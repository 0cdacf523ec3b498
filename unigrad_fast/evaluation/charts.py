"""Pictures of an encoder's judgement, drawn by matplotlib as PNG."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence

import numpy as np

from unigrad_fast.runtime.fallback import harmless, printable
from unigrad_fast.runtime.plotting import plotting

with plotting():
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

MOST_NAMED = 60  # classes whose names a confusion matrix has
MOST_NUMBERED = 20  # classes with whose matrix the shares are written
LONGEST = 24  # characters of a name
MOST_COLOURED = 20  # classes with a colour on a map
GRAY, PALE = "#777777", "#D0D0D0"
# Those of Okabe and Ito, safe for colour blindness, and two more; each is used for two classes, with another marker.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#882255", "#999933", "#332288", "#1A1A1A")
MARKERS = ("o", "^")


@plotting()
def draw_confusion(counts: np.ndarray, names: Sequence[str], title: Sequence[str]) -> bytes:
    """A confusion matrix whose colours are shares of each class's images.

    Args:
        counts: numbers of images [K, K], true by predicted.
        names: of the classes.
        title: lines.
    """
    classes, of = len(names), counts.sum(axis=1, keepdims=True)
    share = np.where(of > 0, 100 * counts / np.maximum(of, 1), np.nan)
    side = min(14.0, 4.5 + 0.3 * classes) if classes <= MOST_NAMED else 10.0
    figure = Figure(figsize=(side + 1.6, side + 0.8), dpi=130, layout="constrained")
    axes = figure.subplots()
    axes.set_facecolor(PALE)
    # The square root shows rare confusions beside a diagonal near 100 %.
    image = axes.imshow(share, cmap="Blues", norm=PowerNorm(0.5, 0, 100), interpolation="nearest")
    bar = figure.colorbar(image, ax=axes, shrink=0.6, ticks=[0, 1, 5, 20, 50, 100])
    bar.set_label("share of the class's images, %", fontsize=9)
    bar.ax.tick_params(labelsize=8)
    bar.ax.yaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("taken for", fontsize=10)
    axes.set_ylabel("class", fontsize=10)
    heading = list(title)
    if classes <= MOST_NAMED:
        size = 9 if classes <= 30 else 6.5
        shown = [_name(name) for name in names]
        axes.set_xticks(range(classes), shown, rotation=90, fontsize=size)
        axes.set_yticks(range(classes), shown, fontsize=size)
        axes.tick_params(length=0)
    else:
        heading.append(f"more than {MOST_NAMED} classes: their names are in the .json, in this order")
        axes.tick_params(labelsize=8)
    if classes <= MOST_NUMBERED:
        for row, column in zip(*np.nonzero(counts), strict=True):
            value = share[row, column]
            ink = "white" if value > 30 else "black"
            axes.text(column, row, _percent(value), ha="center", va="center", fontsize=8, color=ink)
    return _png(figure, heading)


@plotting()
def draw_map(
    points: np.ndarray, labels: np.ndarray, names: Sequence[str], title: Sequence[str], axes_names: Sequence[str]
) -> bytes:
    """Points in a plane, coloured by class; of many classes only those with most points, the others are gray.

    Args:
        points: [N, 2].
        labels: int64 [N], positions in `names`.
        title: lines.
        axes_names: of the two axes.
    """
    named, others = coloured(labels)
    figure = Figure(figsize=(9.6, 7), dpi=130, layout="constrained")
    axes = figure.subplots()
    area = float(np.clip(30_000 / len(points), 3, 30))
    for number, label in enumerate(named):
        own = labels == label
        color, marker = COLOURS[number % len(COLOURS)], MARKERS[number // len(COLOURS)]
        shown = f"{_name(names[label])} ({own.sum():,})"
        axes.scatter(
            *points[own].T, s=area, color=color, marker=marker, alpha=0.75, linewidths=0, label=shown, zorder=2
        )
    if len(others):  # the last in the legend
        rest = np.isin(labels, others)
        shown = f"{len(others):,} other classes ({rest.sum():,})"
        axes.scatter(*points[rest].T, s=area, color=PALE, linewidths=0, label=shown, zorder=1)
    axes.set_aspect("equal", adjustable="datalim")
    axes.set_xlabel(axes_names[0], fontsize=9)
    axes.set_ylabel(axes_names[1], fontsize=9)
    axes.tick_params(labelsize=8, colors=GRAY, length=0)
    axes.spines[["top", "right"]].set_visible(False)
    legend = axes.legend(
        loc="upper left",
        bbox_to_anchor=(1.01, 1),
        frameon=False,
        fontsize=9,
        title="class (images)",
        title_fontsize=9,
        alignment="left",
    )
    for handle in legend.legend_handles:
        handle.set_sizes([30])
    return _png(figure, title)


def coloured(labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The classes that a map names, ascending, and the others: of many, the ones with most images."""
    found, counts = np.unique(labels, return_counts=True)
    most = np.argsort(-counts, kind="stable")
    return np.sort(found[most[:MOST_COLOURED]]), np.sort(found[most[MOST_COLOURED:]])


def _percent(value: float) -> str:
    return f"{value:.0f}" if value >= 9.95 else f"{value:.1f}"


def _name(name: str) -> str:
    return plain_text(name if len(name) <= LONGEST else f"{name[: LONGEST // 2]}…{name[-LONGEST // 2 + 1 :]}")


def plain_text(text: str) -> str:
    """Text as it is: otherwise $ would begin a formula."""
    return harmless(printable(text)).replace("\n", " ").replace("$", r"\$")


def _png(figure: Figure, title: Sequence[str]) -> bytes:
    width = int(figure.get_figwidth() * 10.5)  # characters
    lines = [line for part in title for line in textwrap.wrap(plain_text(part), width)]
    figure.suptitle("\n".join(lines), x=0.01, ha="left", fontsize=10.5, fontweight="bold")
    file = io.BytesIO()
    FigureCanvasAgg(figure).print_png(file)
    return file.getvalue()
