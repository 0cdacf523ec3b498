"""The record of the slow tests, `slow-results.md`: a row per test, with when, where and at which commit it last ran."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
TITLE = """# Slow tests

Written by `make test-slow`, and by nothing else; `make test-slow TESTS=...` replaces the rows of the tests that it ran.
"""
COLUMNS = ("test", "result", "seconds", "noted", "time, UTC", "commit", "machine")
PACKAGES = ("torch", "deepspeed", "nvidia-dali-cuda130", "nvidia-dali-cuda120")
Row = tuple[str, ...]  # a cell per column


def record(file: Path, reports: Iterable[pytest.TestReport]) -> None:
    """Rows of the tests that ran take the place of their earlier ones in the file."""
    before = read(file.read_text(encoding="utf-8")) if file.exists() else []
    file.write_text(written(merged(before, rows(reports))), encoding="utf-8")


def rows(reports: Iterable[pytest.TestReport]) -> list[Row]:
    """With what each test noted by `record_property`. A test that was skipped has not run."""
    time, commit, machine = f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d %H:%M}", _commit(), _machine()
    found = []
    for report in reports:
        if report.outcome != "skipped":
            noted = ", ".join(f"{key}: {value}" for key, value in report.user_properties)
            cells = (report.nodeid, report.outcome, f"{report.duration:.0f}", noted, time, commit, machine)
            found.append(tuple(cell.replace("|", "/") for cell in cells))
    return found


def merged(before: list[Row], now: list[Row]) -> list[Row]:
    """In the order that the tests have in the file, new ones last."""
    latest = {row[0]: row for row in now}
    return [latest.pop(row[0], row) for row in before] + list(latest.values())


def read(text: str) -> list[Row]:
    lines = [line for line in text.splitlines() if line.startswith("| ")][1:]  # without the head
    return [tuple(cell.strip() for cell in line[1:-1].split("|")) for line in lines]


def written(rows: list[Row]) -> str:
    lines = [COLUMNS, ("---",) * len(COLUMNS), *rows]
    return TITLE + "\n" + "".join("| " + " | ".join(cells) + " |\n" for cells in lines).replace(" --- ", "---")


def _commit() -> str:
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout.strip()

    changed = " with uncommitted changes" if git("status", "--porcelain") else ""
    return (git("rev-parse", "--short=12", "HEAD") or "unknown") + changed


def _machine() -> str:
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
