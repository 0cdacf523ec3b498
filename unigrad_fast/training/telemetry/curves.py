"""Pictures of a run, drawn from its metrics.jsonl alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from unigrad_fast.runtime.fallback import printable
from unigrad_fast.training.telemetry.events import Events

COLORS = ("#2166ac", "#d6604d", "#4d9221", "#8073ac", "#b8860b", "#525252")
Series = tuple[list[float], list[float]]  # epochs, values


def draw(run_dir: Path | str) -> Path:
    """Draws RUN/curves.png: loss, positive cosine, learning rate with momentum, kNN accuracy over epochs."""
    run_dir = Path(run_dir)
    return draw_comparison({run_dir.resolve().name: run_dir}, run_dir / "curves.png")


def draw_comparison(runs: Mapping[str, Path | str], path: Path | str) -> Path:
    """Draws the four panels of `draw` with one colour per run, named by the keys of `runs`, to a PNG file."""
    figure = Figure(figsize=(11, 7.5), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)
    loss, cosine, rate, accuracy = figure.subplots(2, 2).flat
    momentum = rate.twinx()
    titles = {
        loss: "Loss",
        cosine: "Positive cosine",
        rate: "Learning rate and target momentum",
        accuracy: "kNN accuracy, %",
    }
    for axes, title in titles.items():
        _style(axes, title)
    momentum.spines[["top", "left"]].set_visible(False)
    momentum.tick_params(colors="#777777", labelsize=9, length=0)
    momentum.set_ylabel("target momentum (dashed)", color="#777777", fontsize=9)
    momentum.ticklabel_format(useOffset=False)
    rate.set_ylabel("learning rate (solid)", fontsize=9)

    for number, (label, run_dir) in enumerate(runs.items()):
        color = COLORS[number % len(COLORS)]
        events = read_events(run_dir)
        for axes, name in ((loss, "loss"), (cosine, "positive_cosine")):
            axes.plot(*_series(events, "train", name), color=color, linewidth=1.3, label=printable(label))
        rate.plot(*_series(events, "train", "lr"), color=color, linewidth=1.6)
        momentum.plot(
            *_series(events, "train", "target_momentum"),
            color=color,
            linewidth=1.2,
            linestyle="--",
            alpha=0.7,
        )
        _draw_accuracy(accuracy, events, color, first=number == 0)
    if len(runs) > 1:
        loss.legend(frameon=False, fontsize=9)
    else:
        figure.suptitle(printable(next(iter(runs))), x=0.01, ha="left", fontsize=13, fontweight="bold")
    if not accuracy.lines:
        accuracy.text(0.5, 0.5, "not evaluated", transform=accuracy.transAxes, ha="center", color="#777777")
        accuracy.set(xticks=[], yticks=[])
    else:
        accuracy.margins(y=0.15)
    path = Path(path)
    figure.savefig(path)
    return path


def read_events(run_dir: Path | str) -> list[dict[str, Any]]:
    """The events of RUN/metrics.jsonl in order, without lines that are none."""
    return [event for _, event in Events(Path(run_dir) / "metrics.jsonl").whole]


def _series(events: list[dict[str, Any]], event: str, name: str) -> Series:
    """Epochs and values; null, a value that was not finite, becomes a gap."""
    found = [(e["epoch"], e[name]) for e in events if e["event"] == event and name in e]
    return [x for x, _ in found], [float("nan") if y is None else y for _, y in found]


def _draw_accuracy(axes: Axes, events: list[dict[str, Any]], color: str, first: bool) -> None:
    epochs, values = _series(events, "knn", "accuracy")
    if not epochs:
        return
    axes.plot(epochs, values, color=color, linewidth=1.6, marker="o", markersize=4)
    if epochs[0] == 0:
        axes.plot(0, values[0], marker="o", markersize=8, markerfacecolor="white", markeredgecolor=color, zorder=3)
        if first:  # runs that are compared mostly start at the same point
            _annotate(axes, f"untrained {values[0]:.1f}", (0, values[0]), color, left=True)
    if len(epochs) > 1:
        _annotate(axes, f"{values[-1]:.1f}", (epochs[-1], values[-1]), color, left=False)
    last = next(e for e in reversed(events) if e["event"] == "knn")
    axes.set_title(
        f"{last['protocol']}, k = {last['k']}, T = {last['temperature']:g}, {last['branch']}",
        loc="right",
        fontsize=8,
        color="#777777",
    )


def _annotate(axes: Axes, text: str, point: tuple[float, float], color: str, left: bool) -> None:
    place = (
        {"xytext": (8, -4), "ha": "left", "va": "top"} if left else {"xytext": (0, 8), "ha": "right", "va": "bottom"}
    )
    axes.annotate(text, point, textcoords="offset points", fontsize=9, color=color, **place)


def _style(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel("epoch", fontsize=9)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9, length=0)
