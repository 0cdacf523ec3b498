"""`unigrad-fast plan`: what it prints and writes, what it refuses, and that its page has the table of today's code."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from thin import thin

from unigrad_fast import cli, planning
from unigrad_fast.commands.plan import CARDS_OF_A_NODE, header, row
from unigrad_fast.config import resolve
from unigrad_fast.dry_run.cards import Card

PAGE = Path(__file__).resolve().parents[2] / "docs/plan.md"
SMALL = """
recipe: imagenet_100ep
data: {image_size: 32, batch_size: 256}
model: {backbone: resnet18, projector: {width: 64}}
"""


@pytest.fixture
def planned(tmp_path: Path) -> Callable[..., int]:
    def call(*options: str) -> int:
        (tmp_path / "small.yaml").write_text(SMALL)
        with thin(stages=1):
            return cli.main(
                ["plan", "--recipe", str(tmp_path / "small.yaml"), "--output", str(tmp_path / "out"), *options]
            )

    return call


def test_a_plan_is_printed_and_written(planned, tmp_path, capsys):
    assert planned("--gpus", "32", "--nodes", "4") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert (
        "small, width 64: 32 x NVIDIA H100 SXM in 4 nodes, 8 images at once on each, batch 256, ZeRO stage 0" in shown
    )
    for said in ("counted: ", "expected: ", "reads/s", "a checkpoint of", "WARNING: bound by the host", "fits: "):
        assert said in shown
    (file,) = (tmp_path / "out").iterdir()
    written = json.loads(file.read_text())
    assert (written["ranks"], written["nodes"], written["fits"], written["would_fit"]) == (32, 4, True, [])
    assert written["peak"] == sum(written["memory"].values()) and written["between"] > 0
    assert written["memory, sent, meetings"] == "counted" and written["times"] == "expected"
    assert file.name == "small-h100-32x8-nodes4-width64-stage0-accumulation1-bf16.json"


def test_what_does_not_fit_is_told_what_would(planned, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Card, "usable_memory", property(lambda card: 8e6))
    assert planned("--images", "64") == 0
    shown = capsys.readouterr().out
    assert "does not fit: " in shown and "would fit: data.batch_size " in shown
    assert re.search("^would fit: engine.accumulation_steps [0-9]+: ", shown, re.MULTILINE)
    (file,) = (tmp_path / "out").iterdir()
    assert all(each["peak"] <= 12e6 for each in json.loads(file.read_text())["would_fit"])


def test_a_sweep_has_a_table_a_plot_and_the_figures(planned, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(planning, "WIDTHS", (64,))
    assert planned("--sweep", "true", "--images", "8") == 0
    shown = capsys.readouterr().out
    files = {file.suffix: file for file in (tmp_path / "out").iterdir()}
    assert files.keys() == {".json", ".md", ".png"}
    assert files[".md"].read_text() in shown
    assert [each["ranks"] for each in json.loads(files[".json"].read_text())] == list(planning.CARDS)
    assert files[".png"].read_bytes().startswith(b"\x89PNG")


def test_the_hours_are_those_of_the_epochs_that_were_asked(planned, tmp_path, capsys):
    found = []
    for epochs in (100, 800):
        assert planned("--schedule.epochs", str(epochs), "--overwrite", "true") == 0
        assert f" hours for {epochs} epochs of 1,281,167 images" in capsys.readouterr().out
        (file,) = (tmp_path / "out").iterdir()
        found.append(json.loads(file.read_text()))
    assert [each["epochs"] for each in found] == [100, 800]
    assert found[1]["hours"] == pytest.approx(8 * found[0]["hours"])
    steps = 100 * (1_281_167 // 256)
    assert found[0]["hours"] == pytest.approx(steps * found[0]["step_seconds"] / 3600)


def test_where_nothing_fits_the_status_is_that_of_wrong_input_and_the_file_is_kept(planned, tmp_path, capsys):
    assert planned("--memory_gib", "0.0005") == 2
    shown = capsys.readouterr()
    assert "does not fit: " in shown.out and "would fit" not in shown.out
    nothing = "no stage, placement, batch or accumulation fits into 0.00045 GiB, nine tenths of a NVIDIA H100 SXM"
    assert f"{nothing} with 0.0005 " in shown.err
    (file,) = (tmp_path / "out").iterdir()
    assert "-h100-0.0005gib-" in file.name and json.loads(file.read_text())["fits"] is False


def test_a_file_in_the_way_is_refused_before_anything_is_counted(planned, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(planning.Counted, "of", lambda *_: pytest.fail("counted"))
    (tmp_path / "out").mkdir()
    file = tmp_path / "out/small-a100-40gib-8x16-width64-stage1-accumulation2-fp32.json"
    file.write_text("mine")
    card = ("--card", "a100", "--memory_gib", "40")
    engine = ("--engine.zero_stage", "1", "--engine.accumulation_steps", "2", "--engine.precision", "fp32")
    assert planned(*card, *engine) == 2
    assert f"output = {file}: already exists; give another name, or --overwrite true" in capsys.readouterr().err
    assert file.read_text() == "mine"


@pytest.mark.parametrize("method", ["simclr", "barlow_twins"])
def test_other_methods_are_counted(planned, tmp_path, capsys, method):
    assert planned("--objective.method", method, "--memory_gib", "0.001") == 2
    shown = capsys.readouterr()
    assert f"ZeRO stage 0, {method}" in " ".join(shown.out.split()) and " hours for 100 epochs" in shown.out
    assert "; use a larger engine.accumulation_steps, a smaller data.batch_size, " in shown.err
    (file,) = (tmp_path / "out").iterdir()
    written = json.loads(file.read_text())
    assert written["peak"] == sum(written["memory"].values()) and written["inside"] > 0 and written["would_fit"] == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--gpus 30 --nodes 4", "gpus = 30: does not divide over 4 nodes; use 28 or 32"),
        ("--gpus 24 --nodes 3", "data.batch_size = 256: does not divide over 24 ranks"),
        ("--sweep true --gpus 16", "gpus = 16: not used with sweep true; leave it out"),
        ("--engine.compile true", "engine.compile = true: the dry run walks the uncompiled step; leave it out"),
        ("--objective.method simclr --sweep true", "objective.method = simclr: a sweep covers UniGrad only"),
        (
            "--objective.method byol_directpred",
            "objective.method = byol_directpred: the host waits for its eigenvectors",
        ),
        ("--dataset_images 200", "dataset_images = 200: cannot fill a batch of 256; use a smaller data.batch_size"),
    ],
)
def test_what_is_refused_leaves_no_folder(planned, tmp_path, capsys, options, said):
    assert planned(*options.split()) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def written() -> dict[tuple[str, str], str]:
    """Rows of the page's table by width and number of GPUs."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    start = lines.index(header(100)) + 2
    end = next(n for n in range(start, len(lines) + 1) if n == len(lines) or not lines[n].startswith("|"))
    return {tuple(cell.strip() for cell in line.split("|")[1:3]): line for line in lines[start:end]}


def assert_written(widths: tuple[int, ...]) -> None:
    """Numbers may differ by 2 %, as other versions of torch count."""
    config = resolve("imagenet_100ep", {"output": "/nowhere", "data": {"train": "/nowhere"}})
    rows = written()
    for width, plan, fits in planning.sweep(config, widths, planning.CARDS, 128, Card.of("h100"), CARDS_OF_A_NODE):
        ours = row(width, plan, fits, plan.hours(1_281_167, 100)).split("|")[1:-1]
        theirs = rows[str(width), str(plan.setting.ranks)].split("|")[1:-1]
        for one, other in zip(ours, theirs, strict=True):
            try:
                assert float(one.replace(",", "")) == pytest.approx(float(other.replace(",", "")), rel=0.02, abs=0.11)
            except ValueError:
                assert one == other


def test_the_page_has_every_width_on_every_number_of_gpus():
    assert list(written()) == [(str(width), str(cards)) for width in planning.WIDTHS for cards in planning.CARDS]


@pytest.mark.slow
def test_all_rows_of_the_page_are_what_the_planner_says():
    assert_written(planning.WIDTHS)
