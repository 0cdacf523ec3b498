"""Plots of a run, drawn from its metrics.jsonl, as PNG and SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from unigrad_fast.runtime.errors import UserError
from unigrad_fast.runtime.fallback import printable
from unigrad_fast.runtime.plotting import plotting
from unigrad_fast.runtime.run_folder import RunFolder
from unigrad_fast.runtime.validation import leaves
from unigrad_fast.runtime.wording import brief
from unigrad_fast.training.telemetry.collapse import COLLAPSED_EFFECTIVE_RANK, COLLAPSED_FEATURE_STD
from unigrad_fast.training.telemetry.events import read_events

with plotting():
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.text import Annotation
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, StrMethodFormatter

COLORS = ("#2166ac", "#d6604d", "#4d9221", "#8073ac", "#b8860b", "#525252")
GRAY = "#777777"
SMOOTHED_SHARE = 0.04  # share of a curve's points averaged into one point of the smoothed line
FEWEST_SMOOTHED = 30  # points; shorter curves are not smoothed
LEAST_ACCURACY_SPAN = 10  # percentage points; on a finer scale, chance would look like progress
LABEL_POINTS = 12  # height of a label beside the accuracies, including the space below it
PANELS = {  # in the order of the panels: event and title of each number
    "loss": ("train", "Loss"),
    "positive_cosine": ("train", "Positive cosine"),
    "negative_cosine": ("train", "Negative cosine"),
    "accuracy": ("knn", "kNN accuracy, %"),
    "principal_components": ("knn", "Principal components"),
    "feature_std": ("train", "Feature deviation"),
    "effective_rank": ("train", "Effective rank of F"),
    "correlation_term": ("train", "DirectPred: terms F, F^½ (dashed), I (dotted)"),
    "term_cosine": ("train", "DirectPred: cosine of F and F^½"),
    "dynamic_balance": ("train", "DirectPred: balance λ"),
    "greatest_diagonal": ("train", "Diagonal of W: greatest, least (dashed)"),
    "neglected_cosine": ("train", "VICReg: cosine of the neglected term"),
    "second_term_ratio": ("train", "SimCLR: second term over first"),
    "lr": ("train", "Learning rate"),
}
DASHED = {"correlation_term": "root_term", "greatest_diagonal": "least_diagonal"}  # in the panel of another number
DOTTED = {"correlation_term": "identity_term"}
NOISY = ("loss", "positive_cosine", "negative_cosine", "feature_std")
Series = tuple[np.ndarray, np.ndarray]  # epochs, values


def draw(run_dir: Path | str) -> Path:
    """Draws RUN/curves.png and RUN/curves.svg, and returns the path of the former.

    Plotted over epochs: the loss, the metrics of the paper's figures, the kNN accuracy, the two signals of collapse,
    and the learning rate with the target's momentum. A panel without values is left out.
    """
    run_dir = Path(run_dir)
    run = RunFolder(run_dir)
    title = printable("\n".join(filter(None, [run_dir.resolve().name, _about(run)])))
    return draw_comparison({title.replace("$", r"\$"): run_dir}, run.curves)  # otherwise $ would begin a formula


@plotting()
def draw_comparison(runs: Mapping[str, Path | str], path: Path | str) -> Path:
    """Draws the panels of `draw` with one colour per run, named by the keys of `runs`.

    Writes a PNG file and, beside it, an SVG file.
    """
    everything = [read_events(run_dir) for run_dir in runs.values()]
    found = {name: [_series(events, event, name) for events in everything] for name, (event, _) in PANELS.items()}
    found = {name: series for name, series in found.items() if _any_finite(series)}
    columns = max(2, math.ceil(len(found) / 2))
    figure = Figure(figsize=(4.43 * columns, 7.5), dpi=130, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1, wspace=0.03)
    places = iter(figure.subplots(2, columns).flat)
    panels = dict(zip(found, places, strict=False))
    for place in places:
        place.remove()

    colors, labels = _colors(len(runs)), []
    end = max((e["epoch"] for events in everything for e in events if "epoch" in e), default=0) or 1
    for name, axes in panels.items():
        style_axes(axes, PANELS[name][1])
        axes.set_xlim(-0.02 * end, 1.02 * end)
        if name == "accuracy":
            labels = _draw_accuracies(axes, everything)
            continue
        for color, series in zip(colors, found[name], strict=True):
            (_draw_smoothed if name in NOISY else _draw_line)(axes, series, color)
        for style, others in (("--", DASHED), (":", DOTTED)):
            for color, events in zip(colors, everything, strict=True):
                if name in others:
                    _draw_line(axes, _series(events, "train", others[name]), color, linestyle=style)
    if "feature_std" in panels:
        _limit_deviation(panels["feature_std"])
    if "effective_rank" in panels:
        _limit_rank(panels["effective_rank"])
    momenta = [_series(events, "train", "target_momentum") for events in everything]
    if "lr" in panels and _any_finite(momenta):
        _draw_momentum(panels["lr"], momenta, colors)
    _name(figure, list(runs))
    settle(figure)
    _spread(labels)
    return write_figure(figure, Path(path))


def settle(figure: Figure) -> None:
    """Lays a figure out for good; otherwise each drawing would repeat it."""
    figure.get_layout_engine().execute(figure)
    figure.set_layout_engine("none")


def write_figure(figure: Figure, path: Path) -> Path:
    """Writes a PNG file and, beside it, an SVG file; returns the path of the former."""
    FigureCanvasAgg(figure).print_png(path)  # savefig would draw twice
    with matplotlib.rc_context({"svg.hashsalt": "unigrad-fast"}):  # the same run gives the same bytes
        FigureCanvasSVG(figure).print_svg(path.with_suffix(".svg"), metadata={"Date": None})
    return path


def _about(run: RunFolder) -> str:
    """Recipe, method and training images of a run in one line; empty where no config.yaml can be read."""
    try:
        saved = dict(leaves(run.saved_configuration() or {}))
    except UserError:
        return ""
    images = saved.get("data.train")
    parts = {
        "recipe": saved.get("recipe"),
        "method": saved.get("objective.method"),
        "row": saved.get("objective.row"),
        "images": images and brief(str(images)),
    }
    return ", ".join(f"{key} {value}" for key, value in parts.items() if value)


def _series(events: list[dict[str, Any]], event: str, name: str) -> Series:
    """Epochs and values; null, which stands for a non-finite value, becomes a gap."""
    found = [(e["epoch"], e[name]) for e in events if e["event"] == event and name in e]
    return np.array([x for x, _ in found], float), np.array([y for _, y in found], float)


def _any_finite(series: Sequence[Series]) -> bool:
    return any(np.isfinite(values).any() for _, values in series)


def smoothed(values: np.ndarray) -> np.ndarray:
    """Moving average over the finite values in a symmetric window; gaps stay gaps.

    Towards both ends the window narrows to a quarter, so that the line begins and ends near the first and last value.
    """
    most = max(1, round(len(values) * SMOOTHED_SHARE / 2))
    place = np.arange(len(values))
    half = np.clip(np.minimum(place, place[::-1]), most // 4, most)
    finite = np.isfinite(values)
    sums, counts = (np.concatenate([[0], np.cumsum(each)]) for each in (np.where(finite, values, 0), finite))
    first, last = np.maximum(place - half, 0), np.minimum(place + half + 1, len(values))
    with np.errstate(invalid="ignore"):
        return np.where(finite, (sums[last] - sums[first]) / (counts[last] - counts[first]), np.nan)


def _draw_smoothed(axes: Axes, series: Series, color: str) -> None:
    """The values, thin and pale, below their smoothed line."""
    epochs, values = series
    if len(values) < FEWEST_SMOOTHED:
        _draw_line(axes, series, color)
        return
    axes.plot(epochs, values, color=color, linewidth=0.7, alpha=0.35)
    _draw_line(axes, (epochs, smoothed(values)), color)


def _draw_line(axes: Axes, series: Series, color: str, **style: Any) -> None:
    """A line; isolated values between gaps, which a line would not show, become points."""
    epochs, values = series
    axes.plot(epochs, values, **{"color": color, "linewidth": 1.7, **style})
    finite = np.pad(np.isfinite(values), 1)
    alone = finite[1:-1] & ~finite[:-2] & ~finite[2:]
    if alone.any():
        axes.plot(epochs[alone], values[alone], color=color, linestyle="", marker="o", markersize=3)


def _limit_deviation(axes: Axes) -> None:
    """Scale from 0 (all vectors equal) to 1 (spread evenly), with the threshold below which a run warns."""
    _mark(axes, 1.0, "1: spread\nevenly")
    _mark(axes, COLLAPSED_FEATURE_STD, f"collapsed\nbelow {COLLAPSED_FEATURE_STD:g}")
    axes.set_ylim(0, max(1.06, axes.get_ylim()[1]))


def _limit_rank(axes: Axes) -> None:
    """Logarithmic scale from 1 (all vectors on one line), with the threshold below which a run warns."""
    _mark(axes, COLLAPSED_EFFECTIVE_RANK, f"collapsed\nbelow {COLLAPSED_EFFECTIVE_RANK:g}")
    axes.set_yscale("log")
    axes.set_ylim(0.93, max(10.0, 1.15 * np.nanmax(np.concatenate([line.get_ydata() for line in axes.lines]))))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))


def _draw_accuracies(axes: Axes, runs: list[list[dict[str, Any]]]) -> list[Annotation]:
    """Draws kNN accuracies; returns the labels of the untrained encoders and of the last values.

    The labels are beside the panel, where no curve passes.
    """
    labels, starts = [], set()
    for color, events in zip(_colors(len(runs)), runs, strict=True):
        epochs, values = _series(events, "knn", "accuracy")
        if not len(values):
            continue
        axes.plot(epochs, values, color=color, linewidth=1.7, marker="o", markersize=5 if len(values) < 40 else 0)
        untrained = f"{values[0]:.1f} untrained"
        if epochs[0] == 0 and np.isfinite(values[0]) and untrained not in starts:  # compared runs may share it
            starts.add(untrained)
            labels.append(_mark(axes, values[0], untrained, fontsize=10))
        if epochs[-1] > 0 and np.isfinite(values[-1]):
            labels.append(_beside(axes, values[-1], f"{values[-1]:.1f}", color, fontsize=11, fontweight="bold"))
        last = next(e for e in reversed(events) if e["event"] == "knn")
        settings = f"{last['protocol']}, k {last['k']}, T {last['temperature']:g}, {last['branch']}"
        axes.set_ylabel(settings, fontsize=9, color=GRAY)
    axes.margins(y=0.12)
    limit_accuracy(axes)
    return labels


def limit_accuracy(axes: Axes) -> None:
    """Scale of at least `LEAST_ACCURACY_SPAN`."""
    low, high = axes.get_ylim()
    missing = max(0.0, LEAST_ACCURACY_SPAN - (high - low))
    axes.set_ylim(low - missing / 2, high + missing / 2)


def _spread(labels: list[Annotation]) -> None:
    """Moves labels up until none overlap; call after the layout is fixed."""
    below = -np.inf
    for label in sorted(labels, key=lambda label: label.xy[1]):
        height = label.axes.transData.transform(label.xy)[1] * 72 / label.figure.dpi
        below = max(height, below + LABEL_POINTS)
        label.set_position((label.get_position()[0], below - height))


def _mark(axes: Axes, value: float, text: str, fontsize: float = 8) -> Annotation:
    """A dotted line at a value, with a label."""
    axes.axhline(value, color=GRAY, linewidth=1, linestyle=":", zorder=1)
    return _beside(axes, value, text, GRAY, fontsize=fontsize)


def _beside(axes: Axes, value: float, text: str, color: str, **style: Any) -> Annotation:
    """Text to the right of a panel, at a value's height."""
    return axes.annotate(
        text,
        (1, value),
        xycoords=("axes fraction", "data"),
        xytext=(5, 0),
        textcoords="offset points",
        annotation_clip=False,
        va="center",
        color=color,
        **style,
    )


def _name(figure: Figure, labels: list[str]) -> None:
    """The name of a single run as the title, or a legend of several runs above the panels."""
    if len(labels) == 1:
        figure.suptitle(labels[0], x=0.01, ha="left", fontsize=12, fontweight="bold")
        return
    handles = [Line2D([], [], color=color, linewidth=2) for color in _colors(len(labels))]
    figure.legend(handles, labels, loc="outside upper left", ncols=len(labels), frameon=False, fontsize=11)


def _colors(count: int) -> list[str]:
    return [COLORS[number % len(COLORS)] for number in range(count)]


def style_axes(axes: Axes, title: str) -> None:
    """A panel's title, its axis of epochs and its grid."""
    axes.set_title(title, loc="left", fontsize=12)
    axes.set_xlabel("epoch", fontsize=9)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9, length=0)
    axes.xaxis.set_major_locator(MaxNLocator(7, steps=(1, 2, 3, 5, 10)))


def _draw_momentum(rate: Axes, momenta: Sequence[Series], colors: Sequence[str]) -> None:
    """The target's momentum, dashed, on an axis of its own to the right of the learning rate's."""
    rate.set_title("Learning rate and target momentum", loc="left", fontsize=12)
    rate.set_ylabel("learning rate (solid)", fontsize=9)
    axes = rate.twinx()
    axes.spines[["top", "left", "right"]].set_visible(False)
    axes.tick_params(colors=GRAY, labelsize=9, length=0)
    axes.set_ylabel("target momentum (dashed)", color=GRAY, fontsize=9)
    axes.ticklabel_format(useOffset=False)
    for color, series in zip(colors, momenta, strict=True):
        _draw_line(axes, series, color, linestyle="--", alpha=0.7)
