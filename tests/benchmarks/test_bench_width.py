"""Widths of the projector: each is measured in turn, trained and judged where that is asked for, or only counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_bench_scaling import thin_process
from thin import thin

from unigrad_fast import cli
from unigrad_fast.benchmarks.harness.run_config import with_images
from unigrad_fast.benchmarks.harness.turns import Turns
from unigrad_fast.benchmarks.measures import width as bench_width
from unigrad_fast.benchmarks.measures.step_blocks import Block
from unigrad_fast.config import Config, resolve
from unigrad_fast.images import drawing
from unigrad_fast.runtime.errors import UserError


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """The quickstart on fewer and smaller images, for an epoch of two steps."""
    drawn = drawing.draw(tmp_path_factory.mktemp("images") / "set", train_per_class=2, val_per_class=1, size=32)
    return resolve(
        "quickstart",
        {
            "data": {"train": drawn / "train", "val": drawn / "val", "batch_size": 8, "image_size": 16, "threads": 1},
            "schedule": {"epochs": 1, "warmup_epochs": 0},
            "evaluation": {"knn": {"k": 2}},
        },
    )


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_width_is_measured_and_recorded(config, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench_width, "new_process", thin_process)
    widths = (32, 24)
    bench_width.main(config, widths, Turns(repetitions=1, steps=1), False, tmp_path)
    rows = rows_of(tmp_path / "width.jsonl")
    assert [row["width"] for row in rows] == list(widths)
    for row in rows:
        assert 0 < row["least"] <= row["median"] <= row["most"] and row["peak_gib"] > 0.1
        assert row["objective_share"] == pytest.approx(row["phases"]["ms_objective"] / sum(row["phases"].values()))
        assert row.items() >= {"recipe": "quickstart", "batch_size": 8, "epochs": None, "knn": None}.items()
    shown = capsys.readouterr().out
    assert all(f"width {width}" in shown for width in widths)


def test_a_run_of_each_width_is_trained_and_judged_and_not_mixed_with_another(config, tmp_path, monkeypatch):
    block = Block(1.0, 1.0, {"ms_objective": 1.0})
    monkeypatch.setattr(bench_width, "measure", lambda _, widths, *__: {width: [block] for width in widths})
    with thin():
        bench_width.main(config, (24,), Turns(), True, tmp_path)
    (row,) = rows_of(tmp_path / "width.jsonl")
    assert row["epochs"] == 1
    assert row["knn"] == json.loads((tmp_path / "width-24/summary.json").read_text())["knn_last"]
    assert resolve(tmp_path / "width-24/config.yaml").model.projector.width == 24
    longer = config.model_copy(update={"schedule": config.schedule.model_copy(update={"epochs": 2})})
    with pytest.raises(UserError, match=r"schedule\.epochs = 2: the run in .*width-24 has 1"):
        bench_width.main(longer, (24,), Turns(), True, tmp_path)


def test_the_share_of_the_objective_is_that_of_its_phase_over_the_rounds():
    blocks = [Block(speed, 1.0, {"ms_objective": 10 * speed, "ms_online": 30.0}) for speed in (1.0, 4.0, 2.0)]
    row = bench_width.row_of(512, 64, blocks)
    assert row["objective_share"] == 20 / 50
    assert [row[key] for key in ("median", "least", "most")] == [32_000, 16_000, 64_000]


def test_widths_are_those_that_memory_holds_together(config):
    one, two = (bench_width.needed_bytes(config, width) for width in (512, 1024))
    assert bench_width.that_fit(config, None, one + two) == [512, 1024]
    assert bench_width.that_fit(config, (1024, 512, 512), one + two) == [1024, 512]
    with pytest.raises(UserError, match=r"widths = 512,1024: the processes up to width 1024,.* give fewer or smaller"):
        bench_width.that_fit(config, (512, 1024), one + two - 1)
    with pytest.raises(UserError, match=r"widths = null: .* give --widths"):
        bench_width.that_fit(config, None, one - 1)


def test_without_images_those_of_the_quickstart_are_drawn(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(drawing.draw, "__defaults__", (0, 1, 1, 32))
    for recipe in ("quickstart", "imagenet_100ep"):
        found, what = with_images(resolve(recipe), tmp_path / "results")
        assert what == f"drawn images, in {tmp_path}/results/quickstart-images"
        assert found.data.train.is_dir() and found.data.val.is_dir()
    assert with_images(config, tmp_path / "other") == (config, f"images of {config.data.train}")
    assert not (tmp_path / "other").exists()


def test_a_dry_run_counts_every_width(tmp_path, capsys):
    words = "bench width --dry_run true --ranks 2 --images 4 --widths 64,128 --model.backbone resnet18"
    with thin(stages=1):
        assert cli.main([*words.split(), "--output", str(tmp_path)]) == 0
    narrow, wide = rows_of(tmp_path / "dry_width.jsonl")
    assert (narrow["width"], wide["width"]) == (64, 128)
    for row in (narrow, wide):
        assert row["objective_share"] == pytest.approx(
            row["parts"]["objective"]["seconds"] / sum(row["card_seconds"].values())
        )
        assert row.items() >= {"recipe": "quickstart", "ranks": 2, "images_per_rank": 4, "counted_for": "h100"}.items()
    assert narrow["parts"]["objective"]["flops"] < wide["parts"]["objective"]["flops"]
    assert "Counted, not measured" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--ranks 2", "ranks = 2: not used with dry_run false; leave it out"),
        ("--dry_run true --train true", "train = true: not used with dry_run true; leave it out"),
        (
            "--widths 512,x",
            "widths = x: must be an integer from 1 to 131072 (or several, comma-separated)",
        ),
        (
            "--train true --data.train {} --data.val null",
            "train = true: kNN needs validation images, but data.val = null",
        ),
    ],
)
def test_what_would_be_ignored_or_cannot_be_is_refused(words, message, config, capsys):
    assert cli.main(["bench", "width", *words.format(config.data.train).split()]) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")
