"""`bench step --dry_run true`: a table and a row of the recipe's own stage, and no trace of input that is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from thin import thin

from unigrad_fast import cli

SMALL = """
recipe: width_16384
data: {image_size: 32}
model: {backbone: resnet18, projector: {width: 64}}
"""


def counted(folder: Path, recipe: str, *options: str) -> int:
    path = folder / "small.yaml"
    path.write_text(recipe)
    arguments = ("--dry_run", "true", "--recipe", str(path), "--output", str(folder / "results"))
    with thin(stages=1):
        return cli.main(["bench", "step", *arguments, *options])


def test_the_wide_recipe_is_counted_at_its_stage(tmp_path, capsys):
    assert counted(tmp_path, SMALL, "--ranks", "8", "--images", "4") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert (
        "a step of small on 8 x NVIDIA H100" in shown
        and "4 images each, ZeRO stage 2" in shown
        and "the host never waits" in shown
    )
    (row,) = map(json.loads, (tmp_path / "results/dry_step.jsonl").read_text().splitlines())
    assert row["peak"]["master weights"] == row["peak"]["momentum"] == row["peak"]["weights"] // 8


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("engine: {compile: true}", "engine.compile = true: the dry run walks the uncompiled step; leave it out"),
        ("projector: 3", "unknown key"),
    ],
)
def test_what_is_refused_leaves_no_folder(tmp_path, capsys, more, said):
    assert counted(tmp_path, SMALL + more) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "results").exists()


def test_a_file_in_place_of_the_folder_is_said_before_anything_is_counted(tmp_path, capsys):
    (tmp_path / "results").write_text("")
    assert counted(tmp_path, SMALL) == 2
    assert "results is a file; give a folder" in capsys.readouterr().err
