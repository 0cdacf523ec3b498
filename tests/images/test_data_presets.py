"""`data presets`: every preset as the loader has it, within 100 columns, without torch."""

import subprocess
import sys
from pathlib import Path

import pytest

from unigrad_fast import cli
from unigrad_fast.images import preset_table
from unigrad_fast.pipelines import PRESETS, DataError, preset_views
from unigrad_fast.runtime.older_names import note

ROOT = Path(__file__).resolve().parents[2]


def printed(capsys: pytest.CaptureFixture, *arguments: str) -> str:
    assert cli.main(["data", "presets", *arguments]) == 0
    return capsys.readouterr().out


def test_every_preset_stands_there_with_its_source_and_fits_100_columns(capsys):
    lines = printed(capsys).splitlines()
    assert max(map(len, lines)) <= 100
    for name, preset in PRESETS.items():
        assert sum(line.startswith(f"{name} ") for line in lines) == 1
        assert f"  {name:9}  {preset.source}" in lines
    assert not any("…" in line for line in lines)


def test_the_older_name_of_the_command_works_and_says_the_new_one_once(capsys):
    note.cache_clear()
    expected = printed(capsys)
    for said in ("note: data recipes is now data presets\n", ""):
        assert cli.main(["data", "recipes"]) == 0
        assert capsys.readouterr() == (expected, said)
    assert "data recipes" not in cli.overview()


def test_rows_are_the_distinct_views_with_their_numbers():
    byol = [row for row in preset_table.rows() if row[0] == "byol" or row[1] == "global 2"][:2]
    same = ["224", "0.08–1", "3/4–4/3", "bicubic", "0.4 0.4 0.2 0.1", "0.8", "0.2"]
    assert byol == [
        ["byol", "global 1", *same, "1", "0.1–2", "–", "0.5"],
        ["", "global 2", *same, "0.1", "0.1–2", "0.2", "0.5"],
    ]
    rows = list(preset_table.rows())
    multicrop = [row[0] for row in rows].index("multicrop")
    assert [row[:4] for row in rows[multicrop : multicrop + 2]] == [
        ["multicrop", "2 global", "224", "0.4–1"],
        ["", "6 local", "96", "0.05–0.4"],
    ]
    assert rows[-1] == ["linear", "1 global", "224", "0.08–1", "3/4–4/3", "bilinear", *"––––––", "0.5"]


def test_rows_count_all_views():
    numbers = [which.split()[0] for _, which, *_ in preset_table.rows()]
    counted = sum(1 if number == "global" else int(number) for number in numbers)
    assert counted == sum(len(preset.views) for preset in PRESETS.values())


def test_markdown_is_a_table_of_the_same_cells(capsys):
    table, sources = printed(capsys, "--markdown", "true").rstrip("\n").split("\n\n")
    head, rule, *lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    assert len(head) == len(rule) == len(preset_table.COLUMNS)
    assert [[line[0].strip("`"), *line[1:]] for line in lines] == list(preset_table.rows())
    assert sources.splitlines() == [f"- `{name}`: {preset.source}" for name, preset in PRESETS.items()]


def test_the_documentation_holds_this_table():
    assert preset_table.as_markdown().strip() in (ROOT / "docs" / "data.md").read_text(encoding="utf-8")


def test_the_overrides_that_are_shown_exist():
    words = preset_table.OVERRIDES.split("\n  ", 1)[1].split()
    keys = [word.removeprefix("--data.") for word in words[::2]]
    assert keys == ["preset", "local_crops", "global_views.scale", "second_view.blur_probability", "local_views.size"]
    changes = {"global_views": {"scale": (0.3, 1)}, "second_view": {"blur_probability": 0.2}}
    views = preset_views("multicrop", local_crops=4, local_views={"size": 64}, **changes)
    assert len(views) == 6 and views[1].blur_probability == 0.2 and views[0].scale == (0.3, 1) and views[2].size == 64
    with pytest.raises(DataError):
        preset_views("multicrop", local_views={"pixels": 64})


def test_neither_torch_nor_dali_is_imported():
    code = "import sys; from unigrad_fast import cli; cli.main(['data', 'presets']); print(*sys.modules, sep='\\n')"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert "multicrop" in ended.stdout
    assert not {"torch", "nvidia.dali", "PIL"} & set(ended.stdout.splitlines())
