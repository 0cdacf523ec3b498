"""The record of the slow tests: a rerun of some replaces their rows alone, and the committed file is its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import slow_results


def report(test: str, seconds: float, outcome: str = "passed", **noted) -> pytest.TestReport:
    place = ("tests/a.py", 1, test)
    return pytest.TestReport(
        f"tests/a.py::{test}", place, {}, outcome, None, "call", user_properties=[*noted.items()], duration=seconds
    )


def test_a_partial_rerun_replaces_its_own_rows_and_keeps_the_others_with_their_commit_and_time(tmp_path, monkeypatch):
    file = tmp_path / "slow.md"
    monkeypatch.setattr(slow_results, "_commit", lambda: "first")
    slow_results.record(file, [report("one", 1.2, accuracy=65.4), report("two[0]", 2)])
    first = slow_results.read(file.read_text())
    monkeypatch.setattr(slow_results, "_commit", lambda: "second")
    slow_results.record(file, [report("three", 3), report("one", 4, "failed"), report("two[0]", 0, "skipped")])
    rows = slow_results.read(file.read_text())
    assert [row[:4] for row in rows] == [
        ("tests/a.py::one", "failed", "4", ""),
        ("tests/a.py::two[0]", "passed", "2", ""),
        ("tests/a.py::three", "passed", "3", ""),
    ]
    assert first[0][3] == "accuracy: 65.4" and rows[1] == first[1]
    assert [row[5] for row in rows] == ["second", "first", "second"]


def test_the_committed_record_is_as_the_tests_write_it():
    text = (Path(__file__).parent / "slow-results.md").read_text(encoding="utf-8")
    rows = slow_results.read(text)
    assert rows and all(len(row) == len(slow_results.COLUMNS) for row in rows)
    assert {row[1] for row in rows} == {"passed"}
    assert slow_results.written(rows) == text
