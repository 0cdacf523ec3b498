"""The tables against numbers worked by hand: means, deviations, paired intervals, orders, and what is missing."""

from __future__ import annotations

import csv
import json
import math
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some
from scipy.stats import t as student

from unigrad_fast.comparison import figures, tables
from unigrad_fast.comparison.figures import KNN, Difference, Ended, Row, ended, t_quantile
from unigrad_fast.comparison.folder import ComparisonFolder
from unigrad_fast.comparison.members import Asked
from unigrad_fast.comparison.paper_values import FEW, TABLES, Line
from unigrad_fast.comparison.tables import Comparison, contents


def row(
    name: str, accuracies: dict[int, float | None], paper: float | None = None, figure: str = KNN, column: str = ""
) -> Row:
    line = Line(name, name, {"name": name}, {} if paper is None else {"linear": paper}, column)
    at = {seed: Ended({} if value is None else {figure: value}, done=True) for seed, value in accuracies.items()}
    return Row(line, {seed: Path("/runs", f"{name}-{seed}") for seed in at}, at)


T = 0.95 * math.sqrt(
    2 / (1 - 0.95**2)
)  # of three seeds: with two degrees of freedom |T| < t has probability t / √(2 + t²)
# Paired differences of a and b: 1, 2, 3, with mean 2 and deviation 1.
A, B = row("a", {0: 51, 1: 54, 2: 57}, 70.0), row("b", {0: 50, 1: 52, 2: 54}, 69.0)
C = row("c", {0: 60, 1: 50, 2: 52}, 71.0)


def test_mean_deviation_and_interval_are_those_worked_by_hand():
    assert A.over(KNN).mean == 54 and A.over(KNN).deviation == 3
    assert B.over(KNN).mean == 52 and B.over(KNN).deviation == 2
    (found,) = figures.differences([A, B], KNN, "linear")
    assert (found.mean, found.seeds, found.paper) == (2, 3, 1)
    assert found.half == pytest.approx(T / math.sqrt(3), rel=1e-12)
    assert found.exceeds is False and found.verdict == figures.UNDECIDED


def test_a_difference_that_all_seeds_have_exceeds_those_between_seeds():
    """The deviations of the lines are large, those of the paired differences are not."""
    one, other = row("one", {0: 50, 1: 60.1, 2: 70}, 69.0), row("other", {0: 48, 1: 58, 2: 68.1}, 70.0)
    (found,) = figures.differences([one, other], KNN, "linear")
    # 2, 2.1, 1.9: deviation 0.1
    assert found.mean == pytest.approx(2) and found.half == pytest.approx(0.1 * T / math.sqrt(3))
    assert found.exceeds and found.verdict == figures.CONTRADICTS
    text = contents(Comparison("title", [one, other]))["md"].decode()
    assert "Here 1 of 1 pair do, over 3 seeds:" in text
    assert "    - one above other by 2.00 ± 0.25\n" in text
    assert "1 in the other order" in text and "one above other by 2.00 ± 0.25; in the paper -1.0 for one" in text


@given(some.integers(1, 60), some.floats(0.5, 0.999))
def test_the_quantile_is_students(freedom, confidence):
    assert t_quantile(freedom, confidence) == pytest.approx(student.ppf((1 + confidence) / 2, freedom), rel=1e-9)


@given(some.lists(some.tuples(some.floats(0, 100), some.floats(0, 100)), min_size=3, max_size=6), some.randoms())
def test_a_difference_turns_its_sign_with_the_lines_and_does_not_depend_on_the_order_of_seeds(
    pairs, chance: random.Random
):
    one = {seed: first for seed, (first, _) in enumerate(pairs)}
    other = {seed: second for seed, (_, second) in enumerate(pairs)}
    (there,) = figures.differences([row("one", one), row("other", other)], KNN, "linear")
    seeds = list(one)
    chance.shuffle(seeds)
    (back,) = figures.differences([row("other", other), row("one", {seed: one[seed] for seed in seeds})], KNN, "linear")
    assert back.mean == pytest.approx(-there.mean, abs=1e-9) and back.half == pytest.approx(there.half, abs=1e-9)


@pytest.mark.parametrize("seeds", [1, 2])
def test_too_few_seeds_say_nothing_about_differences(seeds):
    one, other = (
        row(name, dict.fromkeys(range(seeds), value), paper)
        for name, value, paper in (("one", 50, 70.0), ("other", 40, 69.0))
    )
    (found,) = figures.differences([one, other], KNN, "linear")
    assert found.exceeds is None and found.half is None and found.verdict == figures.SAME
    text = contents(Comparison("title", [one, other]))["md"].decode()
    assert "Too few seeds: differences of kNN can be told from those between seeds with at least 3" in text
    assert "1 as in the paper, too few seeds" in text


def test_only_seeds_that_both_have_are_compared():
    one, other = row("one", {0: 50, 1: 90, 2: 52, 3: 54}), row("other", {0: 49, 1: None, 2: 51, 3: 53})
    (found,) = figures.differences([one, other], KNN, "linear")
    assert (found.seeds, found.mean, found.half) == (3, 1, 0)
    assert found.exceeds


def test_the_markdown_table_has_the_papers_values_beside_ours():
    text = contents(Comparison("title", [A, B]))["md"].decode().splitlines()
    assert text[:6] == [
        "# title",
        "",
        "|     |          kNN | linear (paper) |  seeds | remark |",
        "| --- | -----------: | -------------: | -----: | ------ |",
        "| a   | 54.00 ± 3.00 |       – (70.0) | 3 of 3 |        |",
        "| b   | 52.00 ± 2.00 |       – (69.0) | 3 of 3 |        |",
    ]


def test_linear_accuracies_order_the_lines_where_all_members_have_them():
    both = [row(name, {0: value, 1: value + 1}, figure="linear") for name, value in (("a", 50), ("b", 60))]
    assert Comparison("title", both).judged_by == "linear"
    assert Comparison("title", [*both, A]).judged_by == KNN


def test_two_dimensions_are_laid_out_as_the_papers():
    rows = [
        row(name, {0: value}, paper, column=column)
        for name, column, value, paper in (
            ("stop", "x", 1.0, 67.6),
            ("stop", "y", 2.0, 67.9),
            ("momentum", "x", 3.0, 70.0),
        )
    ]
    lines = contents(Comparison("title", rows))["md"].decode().splitlines()
    assert lines[2:6] == [
        "| kNN (paper: linear) |           x |           y |",
        "| ------------------- | ----------: | ----------: |",
        "| stop                | 1.00 (67.6) | 2.00 (67.9) |",
        "| momentum            | 3.00 (70.0) |           – |",
    ]


def test_csv_and_json_have_the_same_numbers():
    made = contents(Comparison("title", [A, B, C]))
    first, *_ = csv.DictReader(made["csv"].decode().splitlines())
    assert (first["row"], first["kNN mean"], first["kNN deviation"], first["kNN seeds"]) == ("a", "54.0", "3.0", "3")
    assert (first["linear mean"], first["paper linear"]) == ("", "70.0")
    tree = json.loads(made["json"])
    assert tree["rows"][0]["figures"][KNN] == {"mean": 54, "deviation": 3, "values": {"0": 51, "1": 54, "2": 57}}
    assert [(each["one"], each["other"]) for each in tree["differences"]] == [("a", "b"), ("a", "c"), ("b", "c")]


@pytest.fixture
def member(tmp_path):
    (found,) = Asked(methods=("moco",), common={"recipe": "quickstart"}).members(tmp_path)
    (found.config.output / "evaluation").mkdir(parents=True)
    return found


def finished(member, **changes):
    summary = {"steps": 5, "skipped_steps": 0, "epochs": 12.0, "knn_first": 20.0, "knn_last": 30.0}
    summary |= {"wall_seconds": 150.0, "evaluation_seconds": 30.0, **changes}
    (member.config.output / "summary.json").write_text(json.dumps(summary))


def result(member, name: str, **content):
    file = member.config.output / "evaluation" / f"{name}.json"
    file.write_text(json.dumps({"protocol": "paper", "epoch": 12.0, "accuracy": 41.5, **content}))


def test_figures_are_read_from_the_summary_and_from_the_evaluations_of_the_last_epoch(member, tmp_path):
    folder = ComparisonFolder(tmp_path)
    assert ended(member, folder) == Ended({})
    finished(member)
    assert ended(member, folder) == Ended({KNN: 30.0}, done=True, untrained=20.0, minutes=2.0)
    result(member, "linear-paper-epoch6", epoch=6.0, accuracy=1.0)
    assert ended(member, folder).figures == {KNN: 30.0}
    result(member, "linear-paper-epoch12")
    result(member, "finetune-twist-0.01-epoch12", fraction=0.01, accuracy=60.8, top5=83.8)
    result(member, "finetune-twist-0.1-epoch12", fraction=0.1, accuracy=71.5, top5=90.6)
    assert ended(member, folder).figures == {
        KNN: 30.0,
        "linear": 41.5,
        **dict(zip(FEW, (60.8, 83.8, 71.5, 90.6), strict=True)),
    }


def test_an_empty_cell_comes_with_the_command_that_fills_it(member, tmp_path):
    finished(member)
    rows = [Row(member.line, {0: member.config.output}, {0: ended(member, ComparisonFolder(tmp_path))})]
    text = contents(Comparison("title", rows))["md"].decode()
    assert f"for run in {member.config.output}; do\n" in text
    assert 'evaluate linear "$run" --protocol paper\ndone' in text
    few = contents(Comparison("title", rows, TABLES["few_labels"]))["md"].decode()
    assert few.count("evaluate finetune") == 2 and 'evaluate finetune "$run" --fraction 0.01\n' in few
    result(member, "linear-paper-epoch12")
    rows = [Row(member.line, {0: member.config.output}, {0: ended(member, ComparisonFolder(tmp_path))})]
    assert "Empty cells" not in contents(Comparison("title", rows))["md"].decode()


FAILURES = {
    "stopped: loss is not finite\n\nexit status 3\n": "status 3: stopped: loss is not finite",
    "a\nerror: x = 1: no\n\nexit status 2\n": "status 2: error: x = 1: no",
    "Traceback ...\nValueError: y\n\nexit status 1\n": "status 1: ValueError: y",
    "step 3\n\nexit status -9\n": "killed by SIGKILL",
    "step 3\n\nexit status 137\n": "killed by SIGKILL",
    "preempted: saved\n\nexit status 75\n": None,
    "interrupted: saved\n\nexit status 130\n": None,
    "step 3": None,
    "": None,
}


@pytest.mark.parametrize("log", FAILURES)
def test_a_member_that_failed_is_a_line_with_its_reason(member, tmp_path, log):
    folder = ComparisonFolder(tmp_path)
    folder.logs.mkdir()
    folder.log(member).write_text(log)
    at = ended(member, folder)
    assert at == Ended({}, FAILURES[log])
    text = contents(Comparison("title", [Row(member.line, {0: member.config.output}, {0: at})]))["md"].decode()
    assert (f"seed 0: {FAILURES[log]}" if FAILURES[log] else "not finished: seed 0") in text
    assert "0 of 1" in text


def test_a_run_that_dropped_every_step_failed(member, tmp_path):
    finished(member, skipped_steps=5)
    at = ended(member, ComparisonFolder(tmp_path))
    assert at.failure == "all steps had NaN or infinite values and were dropped" and at.done and not at.figures


def test_a_line_that_is_not_trained_shows_the_papers_values():
    text = contents(
        Comparison("title", [Row(line, {}, {}) for line in TABLES["few_labels"].lines], TABLES["few_labels"])
    )
    (line,) = (line for line in text["md"].decode().splitlines() if line.startswith("| Supervised"))
    assert [cell.strip() for cell in line.split("|")[2:-1]] == [
        "–",
        *("– (25.4)", "– (48.4)", "– (56.4)", "– (80.4)"),
        *("–", "not trained here"),
    ]


def test_all_verdicts_are_told():
    every = [
        Difference(A.line, B.line, seeds, mean, half, 1.0)
        for seeds, mean, half in ((3, 2.0, 1.0), (3, -2.0, 1.0), (3, 1.0, 2.0), (1, 1.0, None), (1, -1.0, None))
    ]
    assert tuple(each.verdict for each in every) == figures.VERDICTS
    assert tables.VERDICTS == figures.VERDICTS
