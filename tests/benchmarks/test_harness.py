"""What the benchmarks share: turns, ratios, rows, where rows go."""

import json
import runpy
import sys

import pytest

from unigrad_fast import cli
from unigrad_fast.benchmarks.harness.record import append
from unigrad_fast.benchmarks.harness.turns import ratio_row, spread, take_turns


def test_variants_take_turns_and_warm_up_rounds_are_dropped():
    turns, said = [], []

    def block(name: str):
        return lambda: turns.append(name) or len(turns)

    results = take_turns({"a": block("a"), "b": block("b")}, 2, warmup=1, report=said.append)
    assert turns == ["a", "b", "a", "b", "a", "b"]
    assert results == {"a": [3, 5], "b": [4, 6]}
    assert said == ["warm-up: a", "warm-up: b", *(f"round {n} of 2: {name}" for n in (1, 2) for name in "ab")]


def test_ratios_are_those_of_one_round():
    row = ratio_row("a / b", [2.0, 30.0, 8.0], [1.0, 10.0, 2.0], against="b")
    assert row == {"what": "a / b", "unit": "ratio", "against": "b", "median": 3.0, "least": 2.0, "most": 4.0}
    with pytest.raises(ValueError):
        ratio_row("a / b", [1.0, 2.0], [1.0])


def test_spread_is_median_and_range():
    assert spread([4.0, 1.0, 2.0]) == {"median": 2.0, "least": 1.0, "most": 4.0}


def test_rows_are_appended_with_the_machine(tmp_path):
    for number in range(2):
        path = append(tmp_path / "new/folder", "some", [{"what": number}])
    assert path == tmp_path / "new/folder/some.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["what"] for row in rows] == [0, 1]
    assert all(row.keys() >= {"time", "processor", "cores", "card", "torch", "commit"} for row in rows)


@pytest.mark.parametrize(
    "command", [["step"], ["loader"], ["kernels"], ["kernels", "--compile_only", "true"]], ids=" ".join
)
def test_output_that_is_a_file_is_refused_before_anything_is_measured(command, tmp_path, capsys):
    file = tmp_path / "rows.jsonl"
    file.touch()
    assert cli.main(["bench", *command, "--output", str(file)]) == 2
    assert f"output = {file}: {file} is a file; give a folder" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["pages.manifest", "pages.small_convolution", "micro.compare"])
def test_benchmarks_without_a_command_show_their_help(name, monkeypatch, capsys):
    module = f"unigrad_fast.benchmarks.{name}"
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(SystemExit) as end:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    shown = capsys.readouterr().out
    assert end.value.code == 0
    assert f"python -m {module}" in shown and "--output" in shown
