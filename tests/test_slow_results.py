"""The record of the slow tests: a rerun of some replaces their rows alone, and the committed file is its own."""

from __future__ import annotations

import os
import subprocess
import sys
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

    def run(commit: str, *reports: pytest.TestReport) -> slow_results.Record:
        monkeypatch.setattr(slow_results, "commit", lambda: commit)
        record = slow_results.Record(file)
        for each in reports:
            record.pytest_runtest_logreport(each)
        return record

    run("first", report("one", 1.2, accuracy=65.4), report("two[0]", 2))
    first = slow_results.read(file.read_text())
    second = run("second", report("three", 3), report("one", 4, "failed"), report("two[0]", 0, "skipped"))
    rows = slow_results.read(file.read_text())
    assert [row[:4] for row in rows] == [
        ("tests/a.py::one", "failed", "4", ""),
        ("tests/a.py::two[0]", "passed", "2", ""),
        ("tests/a.py::three", "passed", "3", ""),
    ]
    assert first[0][3] == "accuracy: 65.4" and rows[1] == first[1]
    assert [row[5] for row in rows] == ["second", "first", "second"]
    second.keep({"tests/a.py::three", "tests/a.py::one"})
    assert slow_results.read(file.read_text()) == [rows[0], rows[2]]


def test_a_run_that_is_killed_has_written_what_ended_and_one_of_all_drops_what_is_gone(tmp_path):
    tests = tmp_path / "tests"
    tests.mkdir()
    tests.joinpath("test_it.py").write_text(
        "import os\ndef test_one(): pass\ndef test_two(): assert False\ndef test_three(): os._exit(9)\n"
    )
    tmp_path.joinpath("pytest.ini").write_text("[pytest]\ntestpaths = tests\n")
    tests.joinpath("conftest.py").write_text(
        "from pathlib import Path\nimport slow_results\nslow_results._machine = lambda: 'a machine'\n"
        "def pytest_configure(config): config.pluginmanager.register(slow_results.Record(Path('slow.md')))\n"
    )
    record = slow_results.Record(tmp_path / "slow.md")
    record.pytest_runtest_logreport(report("gone", 1))
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    for arguments, gone in ((["tests/test_it.py"], ["tests/a.py::gone"]), ([], [])):
        run = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
        assert subprocess.run(run, cwd=tmp_path, env=environment, capture_output=True).returncode == 9
        rows = slow_results.read((tmp_path / "slow.md").read_text())
        expected = [("tests/test_it.py::test_one", "passed"), ("tests/test_it.py::test_two", "failed")]
        assert [row[:2] for row in rows] == [(name, "passed") for name in gone] + expected


def test_the_committed_record_is_as_the_tests_write_it():
    text = (Path(__file__).parent / "slow-results.md").read_text(encoding="utf-8")
    rows = slow_results.read(text)
    assert rows and all(len(row) == len(slow_results.COLUMNS) for row in rows)
    assert {row[1] for row in rows} == {"passed"}
    assert slow_results.written(rows) == text
