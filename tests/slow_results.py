"""The record of the slow tests, `slow-results.md`: a row per test, with when, where and at which commit it last ran."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TITLE = """# Slow tests

Written by `make test-slow`, and by nothing else; `make test-slow TESTS=...` replaces the rows of the tests that it ran.
"""
COLUMNS = ("test", "result", "seconds", "noted", "time, UTC", "commit", "machine")
PACKAGES = ("torch", "deepspeed", "nvidia-dali-cuda130", "nvidia-dali-cuda120")
Row = tuple[str, ...]  # a cell per column


class Record:
    """A plugin of pytest that writes each test's row as soon as the test has ended: a run that is cut off loses none.

    A row takes the place of the test's earlier one; a run of all slow tests drops the rows of tests that are gone.
    """

    def __init__(self, file: Path) -> None:
        self.file = file.resolve()  # a test may go elsewhere
        self.commit, self.machine = commit(), _machine()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.config.args_source is pytest.Config.ArgsSource.TESTPATHS:
            self.keep({item.nodeid for item in session.items})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.outcome != "skipped":  # a test that was skipped has not run
            self._write(merged(self._rows(), self._row(report)))

    def keep(self, tests: set[str]) -> None:
        self._write([row for row in self._rows() if row[0] in tests])

    def _row(self, report: pytest.TestReport) -> Row:
        """With what the test noted by `record_property`."""
        noted = ", ".join(f"{key}: {value}" for key, value in report.user_properties)
        time = f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d %H:%M}"
        cells = (report.nodeid, report.outcome, f"{report.duration:.0f}", noted, time, self.commit, self.machine)
        return tuple(cell.replace("|", "/") for cell in cells)

    def _rows(self) -> list[Row]:
        return read(self.file.read_text(encoding="utf-8")) if self.file.exists() else []

    def _write(self, rows: list[Row]) -> None:
        self.file.write_text(written(rows), encoding="utf-8")


def merged(before: list[Row], now: Row) -> list[Row]:
    """In the order that the tests have in the file, a new one last."""
    known = any(row[0] == now[0] for row in before)
    return [now if row[0] == now[0] else row for row in before] + ([] if known else [now])


def read(text: str) -> list[Row]:
    lines = [line for line in text.splitlines() if line.startswith("| ")][1:]  # without the head
    return [tuple(cell.strip() for cell in line[1:-1].split("|")) for line in lines]


def written(rows: list[Row]) -> str:
    lines = [COLUMNS, ("---",) * len(COLUMNS), *rows]
    return TITLE + "\n" + "".join("| " + " | ".join(cells) + " |\n" for cells in lines).replace(" --- ", "---")


def commit() -> str:
    """The commit, and whether files differ from it. The record itself may: it is written while the tests run."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout.strip()

    changed = git("status", "--porcelain", "--", ".", ":!tests/slow-results.md")
    return (git("rev-parse", "--short=12", "HEAD") or "unknown") + (" with uncommitted changes" if changed else "")


def _machine() -> str:
    import torch  # takes seconds

    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    versions = [f"{name} {version}" for name in PACKAGES if (version := _version(name))]
    parts = [models[0] if models else platform.machine(), f"{os.cpu_count()} cores", device]
    return ", ".join([*parts, f"Python {platform.python_version()}", *versions])


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
