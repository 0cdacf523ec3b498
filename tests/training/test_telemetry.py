"""What a run writes and shows: files, console, throughput, warnings, summary and pictures."""

import io
import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import MagicMock

import matplotlib
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from rich.console import Console

from unigrad_fast.config import Config, resolve, to_yaml
from unigrad_fast.evaluation.knn import KNNResult
from unigrad_fast.training.telemetry import Telemetry, curves
from unigrad_fast.training.telemetry.collapse import COLLAPSED_EFFECTIVE_RANK, COLLAPSED_FEATURE_STD, CollapseWatch
from unigrad_fast.training.telemetry.introduction import show_end
from unigrad_fast.training.telemetry.loggers import COMPARED


class Clock:
    """A clock that the test moves."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Run:
    """A telemetry of 100 steps in 10 epochs, its clock and what its console shows."""

    def __init__(self, folder, terminal: bool = False, rank: int = 0, **telemetry: bool) -> None:
        self.folder, self.clock, self.screen = folder, Clock(), io.StringIO()
        config = Config.model_validate(
            {"telemetry": {"tensorboard": False, **telemetry}, "schedule": {"epochs": 10, "warmup_epochs": 1}}
        )
        console = Console(file=self.screen, force_terminal=terminal, width=120 if terminal else 80)
        self.telemetry = Telemetry(folder, config, 100, 10, rank=rank, console=console, clock=self.clock)

    def advance(self, steps: range, seconds: float = 1.0, images: int = 64, data_seconds: float = 0.25) -> None:
        for step in steps:
            self.clock.now += seconds
            self.telemetry.advance(step, images, data_seconds)

    def events(self) -> list[dict]:
        def refuse(constant: str) -> None:
            raise AssertionError(f"{constant} is no JSON")

        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line, parse_constant=refuse) for line in lines]

    @property
    def shown(self) -> str:
        return self.screen.getvalue()


METRICS = {
    "loss": torch.tensor(-0.9),
    "positive_cosine": torch.tensor(0.95),
    "feature_std": torch.tensor(0.8),
    "effective_rank": torch.tensor(40.0),
    "lr": 0.06,
    "target_momentum": 0.96,
}


def knn(accuracy: float) -> KNNResult:
    return KNNResult(accuracy, top5=None, k=20, temperature=0.1, queries=10, bank=50)


def test_metrics_are_on_disk_as_soon_as_they_are_logged(tmp_path):
    run = Run(tmp_path)
    with run.telemetry as telemetry:
        telemetry.log_knn(0, knn(25.0))
        run.advance(range(1, 11))
        telemetry.log_train(10, METRICS)
        first, second = run.events()
    assert first == {
        "event": "knn",
        "step": 0,
        "epoch": 0.0,
        "accuracy": 25.0,
        "k": 20,
        "temperature": 0.1,
        "protocol": "weighted kNN",
        "branch": "online backbone",
    }
    assert (second["event"], second["step"], second["epoch"]) == ("train", 10, 1.0)
    assert second["loss"] == pytest.approx(-0.9)
    assert (second["images_per_second"], second["data_wait_share"]) == (64.0, 0.25)
    assert second["memory_gib"] > 0


@pytest.mark.parametrize(
    ("accuracies", "row"),
    [
        ([], "kNN accuracy │ not evaluated"),
        ([84.29], "kNN accuracy │ 84.29 %"),
        ([84.29, 84.29], "kNN accuracy, first → last │ 84.29 % → 84.29 % (best 84.29 %)"),
        ([20.0, 90.0, 80.0], "kNN accuracy, first → last │ 20.00 % → 80.00 % (best 90.00 %)"),
    ],
)
def test_the_summary_shows_as_many_accuracies_as_were_measured(tmp_path, accuracies, row):
    run = Run(tmp_path)
    with run.telemetry as telemetry:
        for step, accuracy in enumerate(accuracies):
            telemetry.log_knn(step, knn(accuracy))
        telemetry.finish()
    assert f"│ {row} │" in " ".join(run.shown.split())


def test_metrics_that_come_a_step_late_keep_their_step(tmp_path):
    run = Run(tmp_path, tensorboard=True)
    with run.telemetry as telemetry:
        run.advance(range(1, 12))
        telemetry.log_train(10, METRICS | {"loss": math.nan})
        assert telemetry.finish()["steps"] == 11
    assert [event["step"] for event in run.events()] == [10, 10]


def test_throughput_looks_back_on_a_window_and_leaves_evaluation_out(tmp_path):
    run = Run(tmp_path)
    with run.telemetry as telemetry:
        run.advance(range(1, 2), seconds=500.0)  # the first step holds the start-up
        run.advance(range(2, 40), seconds=10.0)
        with telemetry.evaluation():
            run.clock.now += 1000.0
        run.advance(range(40, 91), seconds=0.5)
        assert telemetry.throughput.recent() == {"images_per_second": 128.0, "data_wait_share": 0.5}
        summary = telemetry.finish()
    assert summary["images_per_second"] == pytest.approx(64 * 89 / (38 * 10 + 51 * 0.5))
    assert (summary["evaluation_seconds"], summary["wall_seconds"]) == (1000.0, 500 + 380 + 1000 + 25.5)


def test_plain_lines_have_fixed_columns_and_time_left(tmp_path):
    run = Run(tmp_path)
    with run.telemetry as telemetry:
        run.advance(range(1, 51), seconds=60.0)
        telemetry.log_train(50, METRICS)
        run.advance(range(51, 101), seconds=60.0)
        telemetry.log_train(100, METRICS | {"loss": torch.tensor(-10.25)})
    first, last = run.shown.splitlines()
    assert "step  50/100  epoch    5.00  loss  -0.9000  cosine  0.950  std 0.800" in first
    assert first.endswith("left   0:50:00")
    assert last.endswith("left   0:00:00")
    assert len(first) == len(last)
    assert "\x1b" not in run.shown


def test_plain_lines_are_few_but_metrics_complete(tmp_path):
    run = Run(tmp_path)
    with run.telemetry as telemetry:
        for step in range(1, 101):
            run.advance(range(step, step + 1), seconds=0.5)
            telemetry.log_train(step, METRICS)
    assert len(run.events()) == 100
    assert len(run.shown.splitlines()) == 11  # every 5 s from step 1 on, and the last
    assert "step 100/100" in run.shown.splitlines()[-1]


def test_time_left_counts_the_evaluations_to_come(tmp_path):
    run = Run(tmp_path)  # evaluation.every is 10 epochs: one more at the end
    with run.telemetry as telemetry:
        with telemetry.evaluation():
            run.clock.now += 30.0
        run.advance(range(1, 51), seconds=1.0)
        telemetry.log_train(50, METRICS)
    assert run.shown.splitlines()[-1].endswith("left   0:01:20")


def test_terminal_shows_a_progress_bar_with_the_numbers(tmp_path):
    run = Run(tmp_path, terminal=True)
    with run.telemetry as telemetry:
        run.advance(range(1, 51))
        telemetry.log_train(50, METRICS)
    for part in (
        "epoch 5.0/10",
        "50 %",
        "left 0:00:50",
        "loss -0.9",
        "cosine 0.950",
        "images/s 64",
        "data wait 25%",
    ):
        assert part in run.shown


@pytest.mark.parametrize("terminal", [False, True])
def test_warning_is_shown_logged_and_an_event(tmp_path, terminal):
    run = Run(tmp_path, terminal)
    with run.telemetry as telemetry:
        telemetry.warn("SyncBN is [off]")
    assert "SyncBN is [off]" in run.shown
    assert ("Warning" if terminal else "WARNING") in run.shown
    assert "WARNING: SyncBN is [off]" in (tmp_path / "log.txt").read_text()
    assert run.events() == [{"event": "warning", "step": 0, "epoch": 0.0, "message": "SyncBN is [off]"}]


def test_non_finite_values_become_null_and_an_event(tmp_path):
    run = Run(tmp_path)
    with run.telemetry as telemetry:
        for step in (1, 2):
            telemetry.log_train(step, {"loss": torch.tensor(math.nan), "positive_cosine": -math.inf})
        telemetry.finish()
    train, warning, _, again = run.events()
    assert (train["loss"], train["positive_cosine"]) == (None, None)
    assert warning["message"] == "non-finite at step 1, written as null: loss = nan, positive_cosine = -inf"
    assert (again["event"], again["step"]) == ("warning", 2)
    assert run.shown.count("WARNING") == 1
    assert json.loads((tmp_path / "summary.json").read_text())["loss"] is None


def test_other_ranks_write_and_show_nothing(tmp_path):
    run = Run(tmp_path / "run", rank=1, tensorboard=True)
    with run.telemetry as telemetry:
        run.advance(range(1, 11))
        telemetry.log_train(10, METRICS)
        telemetry.log_knn(10, knn(50.0))
        telemetry.warn("warning")
        telemetry.say("message")
        assert telemetry.finish() == {}
    assert not (tmp_path / "run").exists()
    assert run.shown == ""


def test_tensorboard_holds_the_numbers(tmp_path):
    run = Run(tmp_path, tensorboard=True)
    with run.telemetry as telemetry:
        telemetry.log_train(10, METRICS | {"negative_term": math.nan})
        telemetry.log_knn(10, knn(50.0))
    events = tensorboard_of(tmp_path)
    assert events.Scalars("train/loss")[0].step == 10
    assert events.Scalars("train/loss")[0].value == pytest.approx(-0.9)
    assert events.Scalars("knn/accuracy")[0].value == 50.0
    assert "train/negative_term" not in events.Tags()["scalars"]


def tensorboard_of(folder: Path):
    """What TensorBoard reads of a run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder / "tensorboard")).Reload()


def test_tensorboard_groups_times_and_memory_apart_from_what_judges_the_training(tmp_path):
    run = Run(tmp_path, tensorboard=True)
    with run.telemetry as telemetry:
        run.advance(range(1, 11))
        telemetry.log_train(10, METRICS | {"ms_data": 4.5})
    names = set(tensorboard_of(tmp_path).Tags()["scalars"])
    others = {"time/ms_data", "time/images_per_second", "time/data_wait_share", "system/memory_gib"}
    assert names == {f"train/{name}" for name in METRICS} | others


@pytest.mark.parametrize("method", ["unigrad", "byol"])
def test_tensorboard_compares_runs_by_their_settings(tmp_path, method):
    from tensorboard.plugins.hparams import metadata

    config = resolve("quickstart", {"objective": {"method": method}, "data": {"batch_size": 32}})
    for start_step in (0, 10):  # a resumed run writes them again
        with Telemetry(tmp_path, config, 100, 10, start_step=start_step, console=Console(quiet=True)) as telemetry:
            telemetry.log_train(start_step + 10, METRICS)
    events = tensorboard_of(tmp_path)
    told = metadata.parse_experiment_plugin_data(events.SummaryMetadata(metadata.EXPERIMENT_TAG).plugin_data.content)
    values = metadata.parse_session_start_info_plugin_data(
        events.SummaryMetadata(metadata.SESSION_START_INFO_TAG).plugin_data.content
    ).hparams
    assert values["objective.method"].string_value == method
    assert (values["data.batch_size"].number_value, values["optimizer.base_lr"].number_value) == (32, 1.6)
    assert ("objective.balance" in values) == (method == "unigrad")
    assert {info.name for info in told.hparam_infos} == set(COMPARED)  # whichever run TensorBoard takes them from
    assert {info.name.tag for info in told.metric_infos} == {"train/loss", "knn/accuracy"}
    assert "train/loss" in events.Tags()["scalars"]


def test_summary_and_table_hold_the_result_and_what_to_do_next(tmp_path):
    run = Run(tmp_path)
    with run.telemetry as telemetry:
        for step, accuracy in ((0, 25.0), (50, 61.5), (100, 60.25)):
            run.advance(range(step - 49, step + 1) if step else range(0))
            telemetry.log_train(step, METRICS if step < 100 else {"loss": -0.95})
            telemetry.log_knn(step, knn(accuracy))
        (tmp_path / "weights.safetensors").touch()
        further = {"knn_raw_pixels": 33.25, "skipped_steps": 0, "bad_images": 2}
        summary = telemetry.finish(further, ["unigrad-fast evaluate knn [run]"])
    assert summary == json.loads((tmp_path / "summary.json").read_text())
    assert (summary["knn_first"], summary["knn_last"], summary["knn_best"]) == (25.0, 60.25, 61.5)
    assert (summary["loss"], summary["effective_rank"]) == (-0.95, 40.0)
    for part in (
        "-0.9500",
        "25.00 % → 60.25 % (best 61.50 %)",
        "kNN raw pixels",
        "33.25 %",
        "bad images",
        "weights.safetensors",
    ):
        assert part in run.shown
    assert "skipped steps" not in run.shown and summary["skipped_steps"] == 0
    assert "unigrad-fast evaluate knn [run]" in run.shown.splitlines()[-1]


def test_run_without_evaluation_says_so(tmp_path):
    run = Run(tmp_path)
    with run.telemetry as telemetry:
        summary = telemetry.finish()
    assert summary["knn_last"] is None
    assert "not evaluated" in run.shown


def test_log_tells_how_a_run_ended(tmp_path):
    run = Run(tmp_path)
    with pytest.raises(KeyError), run.telemetry as telemetry:
        telemetry.say("hello")
        raise KeyError("lost")
    log = (tmp_path / "log.txt").read_text()
    assert "hello" in log
    assert "stopped at step 0 by KeyError: 'lost'" in log


def test_collapse_is_warned_of_once_in_a_run(tmp_path):
    run = Run(tmp_path)  # ten steps of warm-up
    with run.telemetry as telemetry:
        for step in range(9, 14):
            telemetry.log_train(step, METRICS | {"feature_std": torch.tensor(0.01)})
    warnings = [event for event in run.events() if event["event"] == "warning"]
    assert [warning["step"] for warning in warnings] == [11]
    assert "feature_std is 0.01, below 0.1" in warnings[0]["message"]


@settings(deadline=None)
@given(
    std=st.none() | st.floats(0, 1),
    rank=st.none() | st.floats(1, 100),
    step=st.integers(0, 20),
)
def test_collapse_watch_speaks_exactly_below_its_thresholds_after_warmup(std, rank, step):
    watch = CollapseWatch(warmup_steps=10)
    low = (std is not None and std < COLLAPSED_FEATURE_STD) or (rank is not None and rank < COLLAPSED_EFFECTIVE_RANK)
    message = watch.check(step, {"feature_std": std, "effective_rank": rank})
    assert (message is not None) == (low and step > 10)
    assert message is None or watch.check(step + 1, {"feature_std": std, "effective_rank": rank}) is None


@pytest.mark.parametrize("evaluated", [True, False])
def test_curves_are_drawn_from_the_metrics(tmp_path, evaluated):
    run = Run(tmp_path)
    with run.telemetry as telemetry:
        for step in range(0, 101, 10):
            telemetry.log_train(step, METRICS | {"loss": math.nan if step == 50 else -step / 100})
            if evaluated:
                telemetry.log_knn(step, knn(20.0 + step / 2))
    assert curves.draw(tmp_path) == tmp_path / "curves.png"
    comparison = curves.draw_comparison({"one": tmp_path, "same": tmp_path}, tmp_path / "both.png")
    for path in (tmp_path / "curves.png", comparison):
        with Image.open(path) as picture:
            assert picture.width > 800 and len(picture.convert("RGB").getcolors(10**6)) > 20
        drawing = path.with_suffix(".svg").read_text()
        said = {text.strip() for text in re.findall("<!--(.*?)-->", drawing, re.DOTALL)}
        assert {"Loss", "Positive cosine", "Feature deviation", "Effective rank of F"} <= said
        assert "Learning rate and target momentum" in said
        assert ("kNN accuracy, %" in said) == ("20.0 untrained" in said) == ("70.0" in said) == evaluated
    before = (tmp_path / "curves.svg").read_bytes()
    curves.draw(tmp_path)
    assert (tmp_path / "curves.svg").read_bytes() == before  # no date, no random names


def drawn(folder: Path) -> tuple[set[str], int]:
    """The texts of a run's curves.svg, and the number of its axes."""
    curves.draw(folder)
    drawing = (folder / "curves.svg").read_text()
    return {text.strip() for text in re.findall("<!--(.*?)-->", drawing, re.DOTALL)}, drawing.count('<g id="axes_')


def test_what_a_method_does_not_have_is_left_out_of_the_curves(tmp_path):
    with Run(tmp_path).telemetry as telemetry:
        for step in (1, 10, 20):
            telemetry.log_train(
                step, {name: METRICS[name] for name in ("loss", "positive_cosine", "feature_std", "lr")}
            )
    said, axes = drawn(tmp_path)
    assert {"Loss", "Positive cosine", "Feature deviation", "Learning rate"} <= said
    assert axes == 4


def test_curves_have_a_panel_of_each_figure_of_the_paper_that_was_measured(tmp_path):
    of_figures = {"negative_cosine": 0.1, "correlation_term": 0.2, "root_term": 0.1, "greatest_diagonal": 0.9}
    with Run(tmp_path).telemetry as telemetry:
        for step in (1, 10):
            telemetry.log_train(step, {"loss": 1.0, **of_figures})
            telemetry.log_knn(step, replace(knn(30.0), components=7))
    said, axes = drawn(tmp_path)
    assert {"Negative cosine", "Principal components", "Diagonal of W: greatest, least (dashed)"} <= said
    assert axes == 6
    assert [event["principal_components"] for event in Run(tmp_path).events() if event["event"] == "knn"] == [7, 7]


def test_curves_of_a_run_that_measured_nothing_are_a_title(tmp_path):
    with Run(tmp_path / "early").telemetry:
        pass
    assert drawn(tmp_path / "early") == ({"early"}, 0)


def test_curves_name_recipe_method_and_images(tmp_path):
    given = {"data": {"train": "/photos/2024_$5/train"}, "objective": {"method": "simclr"}}
    with Run(tmp_path / "run").telemetry as telemetry:
        telemetry.log_train(10, METRICS)
    (tmp_path / "run/config.yaml").write_text(to_yaml(resolve("quickstart", given)))
    said, _ = drawn(tmp_path / "run")
    assert {"run", "recipe quickstart, method simclr, images 2024_$5/train"} <= said


def test_curves_are_drawn_beside_a_damaged_configuration(tmp_path):
    with Run(tmp_path / "run").telemetry as telemetry:
        telemetry.log_train(10, METRICS)
    (tmp_path / "run/config.yaml").write_text("{")
    assert "Loss" in drawn(tmp_path / "run")[0]


def test_somebodys_settings_of_figures_do_not_change_the_curves(tmp_path):
    with Run(tmp_path).telemetry as telemetry:
        telemetry.log_train(10, METRICS)
    curves.draw(tmp_path)
    before = (tmp_path / "curves.svg").read_bytes()
    with matplotlib.rc_context({"text.usetex": True, "figure.dpi": 30, "font.size": 30, "axes.facecolor": "red"}):
        curves.draw(tmp_path)
        assert matplotlib.rcParams["font.size"] == 30
    assert (tmp_path / "curves.svg").read_bytes() == before


def test_pictures_are_drawn_whatever_backend_and_settings_are_in_the_environment(tmp_path):
    (tmp_path / "matplotlibrc").write_text("text.usetex: True\nbackend: nonsense\n")
    code = """
from unigrad_fast.runtime.plotting import plotting
with plotting():
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    figure = Figure()
    figure.suptitle("a title")
    FigureCanvasAgg(figure).print_png("picture.png")
"""
    own = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "MPLBACKEND": "module://not_installed.backend"}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=own, check=True, timeout=120)
    assert (tmp_path / "picture.png").stat().st_size


def test_a_drawing_or_a_log_that_fails_is_said_once_and_costs_no_summary(tmp_path, monkeypatch):
    def fail(path: Path) -> None:
        raise RuntimeError("latex could\nnot be found")

    monkeypatch.setattr(curves, "draw", fail)
    run, trainer = Run(tmp_path, tensorboard=True), MagicMock()
    trainer.config.output, trainer.bad_images.total = tmp_path, 0
    with run.telemetry as telemetry:
        for log in (telemetry.metrics, telemetry.messages):
            log.file.close()
            log.file = open("/dev/full", "w", buffering=1)  # noqa: SIM115
        telemetry.loggers[-1].writer.close()
        telemetry.loggers[-1].writer = open(tmp_path / "closed", "w")  # noqa: SIM115  has no `add_scalar`
        for step in (10, 20):
            run.advance(range(step - 9, step + 1))
            telemetry.log_train(step, METRICS)
        telemetry.progress_so_far()
        show_end(trainer, telemetry, None, 0)
    assert json.loads((tmp_path / "summary.json").read_text())["loss"] == pytest.approx(-0.9)
    shown = " ".join(run.shown.split())
    for said in (
        f"MetricsFile failed ({tmp_path}/metrics.jsonl: No space left on device); the run goes on",
        "TensorBoard failed (AttributeError: ",
        f"WARNING: {tmp_path}/log.txt cannot be written (No space left on device); the run goes on",
        f"drawing {tmp_path}/curves.png failed (RuntimeError: latex could not be found); the run goes on",
    ):
        assert shown.count(said) == 1, run.shown


@given(st.lists(st.none() | st.floats(-10, 10), min_size=1, max_size=200))
def test_a_smoothed_curve_stays_within_its_values_and_keeps_their_gaps(values):
    values = np.array(values, float)
    smoothed = curves.smoothed(values)
    assert np.array_equal(np.isnan(smoothed), np.isnan(values))
    finite = values[np.isfinite(values)]
    if len(finite):
        found = smoothed[np.isfinite(smoothed)]
        assert finite.min() - 1e-9 <= found.min() and found.max() <= finite.max() + 1e-9


def test_a_smoothed_curve_has_little_of_the_noise_and_all_of_the_course():
    noise, course = np.random.default_rng(0).normal(size=1000), np.linspace(0, 100, 1000)
    smoothed = curves.smoothed(course + noise)
    assert np.std(smoothed - course) < np.std(noise) / 4


def test_half_written_last_line_of_a_killed_run_is_passed_over(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"event": "train", "step": 1, "epoch": 1}\n{"event": "tra')
    assert curves.read_events(tmp_path) == [{"event": "train", "step": 1, "epoch": 1}]


BROKEN = (
    *(b"\xff\xfe", b"{}", b"[]", b"7", b'{"event": "tra', b'{"event": "train", "step": "x", "epoch": 0.1}'),
    *(b'{"event": "train", "epoch": 0.1}', b'{"event": "knn", "step": 1, "epoch": 0.1}', b"[" * 100_000, b"\0" * 50),
    *(b'{"event": "train", "step": 1, "epoch": NaN}', b'{"event": "train", "step": 1, "epoch": 0.1, "loss": "low"}'),
    *(b'{"event": {}, "step": 1, "epoch": 0.1}', b'{"event": "warning", "step": 0, "epoch": 0, "message": null}'),
)


@pytest.mark.parametrize("broken", BROKEN)
def test_a_run_goes_on_without_lines_of_its_metrics_that_are_none(tmp_path, broken):
    whole = b'{"event": "knn", "step": 0, "epoch": 0.0, "accuracy": 25.0, "k": 20, "temperature": 0.1, '
    whole += b'"protocol": "weighted kNN", "branch": "online backbone"}'
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([broken, whole, broken, broken]))
    run = Run(tmp_path)
    with run.telemetry as telemetry:
        telemetry.log_train(10, METRICS)
        assert telemetry.finish()["knn_first"] == 25.0
    kinds = [event["event"] for event in run.events()]
    assert kinds == ["knn", "warning", "train"]
    assert "WARNING" in run.shown and "metrics.jsonl: 2 lines are not events, first 1: " in run.shown
    if broken == BROKEN[0]:
        curves.draw(tmp_path)


def test_a_run_folder_whose_name_is_no_text_has_log_and_curves(tmp_path):
    folder = tmp_path / os.fsdecode(b"caf\xe9 [x")
    run = Run(folder)
    with run.telemetry as telemetry:
        telemetry.say(f"run folder {folder}")
        telemetry.log_train(10, METRICS)
        telemetry.finish()
    assert b"caf\xe9 [x" in (folder / "log.txt").read_bytes()
    assert curves.draw(folder).is_file()
