"""Pictures of a comparison: their numbers against those of the runs, and what is left out."""

from __future__ import annotations

import csv
import json
import math
import random
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean, stdev
from typing import Any
from unittest import mock

import pytest
from PIL import Image

from unigrad_fast.comparison import pictures, series
from unigrad_fast.comparison.figures import KNN, Ended, Row
from unigrad_fast.comparison.folder import PICTURES, ComparisonFolder
from unigrad_fast.comparison.paper_values import Line
from unigrad_fast.comparison.series import MOST_POINTS
from unigrad_fast.comparison.tables import Comparison

KNN_SETTINGS = {"k": 20, "temperature": 0.1, "protocol": "weighted kNN", "branch": "online backbone"}
Metrics = Mapping[str, Callable[[int, int], float | None]]  # of a step and a seed


def run(folder: Path, metrics: Metrics, seed: int, steps: int) -> Path:
    """A run's folder with its metrics.jsonl: every step, and kNN every second one."""
    folder.mkdir(parents=True)
    events: list[dict[str, Any]] = []
    for step in range(steps + 1):
        values = {name: of(step, seed) for name, of in metrics.items()}
        knn = {name: values.pop(name) for name in ("accuracy", "principal_components") if name in values}
        at = {"step": step, "epoch": step / 10}
        if step:
            events.append({"event": "train", **at, **values})
        if knn and step % 2 == 0:
            events.append({"event": "knn", **at, **KNN_SETTINGS, **knn})
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in events))
    return folder


def row(where: Path, name: str, metrics: Metrics, seeds: int = 2, steps: int = 8, column: str = "") -> Row:
    """A line whose seeds ended with their last kNN accuracy, and some minutes."""
    accuracy = metrics.get("accuracy", lambda step, seed: 0.0)
    runs = {seed: run(where / f"{name}{column}-seed-{seed}", metrics, seed, steps) for seed in range(seeds)}
    at = {
        seed: Ended(
            {KNN: accuracy(steps, seed)},
            done=True,
            untrained=accuracy(0, seed),
            minutes=1.0 + 0.1 * len(name) + seed / 4,
        )
        for seed in runs
    }
    return Row(Line(name, name, {"name": name}, column=column), runs, at)


def common(shift: float) -> dict[str, Callable[[int, int], float]]:
    return {
        "positive_cosine": lambda step, seed: shift + 0.1 * seed + 0.01 * step,
        "negative_cosine": lambda step, seed: shift - 0.1 * seed,
        "accuracy": lambda step, seed: 10 * shift + step + seed,
        "principal_components": lambda step, seed: 5 + step + 2 * seed,
    }


def drawn(where: Path, *rows: Row, images: int | None = None) -> tuple[list[str], Callable[[str], list[dict]]]:
    """The names of the pictures, and a reader of their numbers."""
    folder = ComparisonFolder(where)
    written = pictures.draw(Comparison("tiny: $1 of_2", rows), folder.pictures, images)
    return [path.stem for path in written], lambda name: list(csv.DictReader((where / f"{name}.csv").open()))


def said(where: Path, name: str) -> set[str]:
    """The texts of a picture."""
    return {text.strip() for text in re.findall("<!--(.*?)-->", (where / f"{name}.svg").read_text(), re.DOTALL)}


@pytest.fixture(scope="module")
def all_kinds(tmp_path_factory):
    where = tmp_path_factory.mktemp("pictures")
    terms = ("correlation_term", "root_term", "identity_term", "term_cosine", "dynamic_balance")
    rows = [
        row(where, "predictor", common(1.0) | {name: lambda step, seed: 1.0 + seed for name in terms}),
        row(where, "twins", common(2.0) | {"least_diagonal": lambda *_: 0.5, "greatest_diagonal": lambda *_: 0.9}),
        row(where, "alone", common(3.0), seeds=1),
    ]
    return where, *drawn(where, *rows, images=700)


def test_every_picture_is_written_in_three_forms_with_its_counts(all_kinds):
    where, names, _ = all_kinds
    assert names == list(PICTURES)
    for name in names:
        with Image.open(where / f"{name}.png") as picture:
            assert picture.width > 800 and len(picture.convert("RGB").getcolors(10**6)) > 20
        texts = " ".join(said(where, name))
        assert "700 validation images" in texts and "deviation of a sample" in texts
        assert "predictor\N{NO-BREAK SPACE}(2)" in texts or (name == "accuracy" and "(2 seeds)" in texts)


def test_a_point_is_mean_and_deviation_over_the_seeds_that_ended(all_kinds):
    _, _, values = all_kinds
    found = {(each["row"], each["metric"], each["step"]): each for each in values("trajectories")}
    point = found["predictor", "positive_cosine", "8.0"]
    assert float(point["mean"]) == pytest.approx(1.13) and float(point["deviation"]) == pytest.approx(stdev([0, 0.1]))
    assert (point["epoch"], point["seeds"]) == ("0.8", "2")
    alone = found["alone", "accuracy", "4.0"]
    assert (alone["mean"], alone["deviation"], alone["seeds"]) == ("34.0", "", "1")
    assert {each["metric"] for each in found.values()} == set(pictures.TRAJECTORIES)


@pytest.fixture
def shown():
    """The figures that are drawn in a test, by name, in place of their files."""
    figures = {}

    def keep(figure, path):
        figures[path.stem] = figure
        return path

    with mock.patch.object(pictures, "write_figure", keep):
        yield figures


def test_what_is_drawn_is_what_the_csv_has(tmp_path, shown):
    rows = [row(tmp_path, name, common(shift)) for name, shift in (("a", 1.0), ("b", 2.0))]
    _, values = drawn(tmp_path, *rows)
    axes = dict(zip(pictures.TRAJECTORIES, shown["trajectories"].axes, strict=True))
    for metric, panel in axes.items():
        told = [
            (float(each["epoch"]), float(each["mean"])) for each in values("trajectories") if each["metric"] == metric
        ]
        assert [point for line in panel.lines for point in line.get_xydata().tolist()] == [list(each) for each in told]
    bars = [float(bar.get_width()) for bar in shown["accuracy"].axes[0].patches]
    assert bars == [float(each["mean"]) for each in values("accuracy")]
    points = [
        line.get_xydata().tolist()[0]
        for line in shown["minutes"].axes[0].lines
        if line.get_marker() in pictures.MARKERS
    ]
    assert points == [[float(each["minutes mean"]), float(each["kNN mean"])] for each in values("minutes")]


@pytest.mark.parametrize("untrained", [3.0, 90.0])
def test_bars_begin_at_zero_and_show_the_untrained_encoder(tmp_path, shown, untrained):
    drawn(tmp_path, row(tmp_path, "a", {"accuracy": lambda step, seed: 20.0 if step else untrained}, seeds=1))
    (axes,) = shown["accuracy"].axes
    low, high = axes.get_xlim()
    assert low == 0 and high > untrained
    assert f"dotted: untrained encoder, {untrained:.2f}" in axes.get_xlabel()


def test_only_panels_with_values_are_drawn(all_kinds, tmp_path):
    where, _, values = all_kinds
    told = said(where, "justification")
    assert "DirectPred: terms F, F^½ (dashed), I (dotted)" in told and "Diagonal of W: greatest, least (dashed)" in told
    assert not any("VICReg" in text or "SimCLR" in text for text in told)
    assert {"root_term", "identity_term", "least_diagonal"} <= {each["metric"] for each in values("justification")}
    names, _ = drawn(tmp_path, row(tmp_path, "plain", common(1.0)))
    assert names == ["trajectories", "accuracy", "minutes"]
    assert not list(tmp_path.glob("justification.*"))


def test_members_that_have_not_ended_are_left_out(tmp_path):
    both = row(tmp_path, "a", common(1.0))
    one = Row(both.line, both.runs, {**both.ended, 1: Ended({}, "status 3")})
    _, values = drawn(tmp_path, one)
    assert {each["seeds"] for name in ("trajectories", "accuracy", "minutes") for each in values(name)} == {"1"}
    assert drawn(tmp_path, Row(both.line, both.runs, {0: Ended({})}))[0] == []


def test_a_gap_of_one_seed_leaves_the_others(tmp_path):
    values = {"positive_cosine": lambda step, seed: None if seed == 0 and step == 3 else 0.5 + seed}
    (curve,) = series.curves([row(tmp_path, "a", values)], ["positive_cosine"])
    assert [len(point.over.values) for point in curve.points] == [2, 2, 1, 2, 2, 2, 2, 2]
    assert curve.points[2].over.mean == 1.5


@pytest.mark.parametrize("steps", [MOST_POINTS, MOST_POINTS + 1, 5 * MOST_POINTS])
def test_long_curves_are_averaged_without_losing_a_report(tmp_path, steps):
    chance = random.Random(steps)
    told = [chance.random() for _ in range(steps + 1)]
    (curve,) = series.curves(
        [row(tmp_path, "a", {"positive_cosine": lambda step, _: told[step]}, 1, steps)], ["positive_cosine"]
    )
    size = math.ceil(steps / MOST_POINTS)
    assert len(curve.points) == math.ceil(steps / size) <= MOST_POINTS
    for number, point in enumerate(curve.points):
        window = range(1 + number * size, min(steps, (number + 1) * size) + 1)
        assert point.over.mean == pytest.approx(fmean(told[step] for step in window))
        assert point.step == fmean(window) and point.epoch == pytest.approx(point.step / 10)


def test_every_line_looks_unlike_the_others():
    looks = [(*pictures._look(place), pictures._dash(place)) for place in range(40)]
    assert len(set(looks)) == 40 and len({look[:2] for look in looks[: pictures.MOST_DRAWN]}) == pictures.MOST_DRAWN
    assert len({look[1:] for look in looks[: pictures.MOST_DRAWN]}) == pictures.MOST_DRAWN  # in grey
