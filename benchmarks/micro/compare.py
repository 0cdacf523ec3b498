"""Times this checkout against another commit with the micro-benchmarks, in turns on one machine.

    make bench-compare BASE=COMMIT
    python -m unigrad_fast.benchmarks.micro.compare --base COMMIT [--rounds 5] [--only EXPRESSION] [--output FOLDER]

The benchmarks are this checkout's; the package that they import is that of either side. They use only public names, and
a benchmark whose name the base lacks is skipped and listed. Each round runs all benchmarks on the base, then on this
checkout, each in a fresh process. A ratio is the base's median time divided by this checkout's in the same round, so
above 1 this checkout is faster; the spread of the ratios over the rounds shows how reliable they are.

The base is checked out in a temporary git worktree, which is removed at the end. Rows are appended to
OUTPUT/compare.jsonl.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.box import SIMPLE
from rich.console import Console

from unigrad_fast.benchmarks.harness import script
from unigrad_fast.benchmarks.harness.record import OUTPUT, append, make_folder
from unigrad_fast.benchmarks.harness.turns import median_and_range, ratio_row, spread, take_turns
from unigrad_fast.runtime.console import new_console, table_of_figures
from unigrad_fast.runtime.errors import RunStopped, UserError

HERE = Path(__file__).resolve().parent
THIS, BASE = "this checkout", "base"
PLUGINS = ("-p", "no:cacheprovider", "-p", "pytest_benchmark.plugin")
# Many short runs say more than few long ones.
TIMES = ("--benchmark-disable-gc", "--benchmark-min-time=0.005", "--benchmark-max-time=0.3", "--benchmark-min-rounds=3")


@dataclass(frozen=True)
class Run:
    """One run of all benchmarks, by name: median seconds, or why a benchmark was skipped or failed."""

    seconds: dict[str, float] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


def git(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True)


def find_commit(root: Path, base: str) -> str:
    """The hash of a commit, given by any of its names.

    Raises:
        UserError: there is no such commit.
    """
    remedy = "give a hash, a branch or a tag of this repository; `git log --oneline` lists commits"
    if not base:
        raise UserError(f"BASE is not given: {remedy}, for example BASE=HEAD~1")
    if shutil.which("git") is None:
        raise UserError("git not found; install it")
    found = git(root, "rev-parse", "--verify", "--quiet", f"{base}^{{commit}}")
    if found.returncode:
        why = "" if git(root, "rev-parse").returncode == 0 else f" ({root} is not a git checkout)"
        raise UserError(f"BASE = {base}: not a commit{why}; {remedy}")
    return found.stdout.strip()


@contextmanager
def checked_out(root: Path, commit: str) -> Iterator[Path]:
    """A worktree of a commit, removed when the context ends, however it ends."""
    on_termination = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory(prefix="bench-compare-") as folder:
        checkout = Path(folder) / "base"
        try:
            made = git(root, "worktree", "add", "--detach", str(checkout), commit)
            if made.returncode:
                raise RunStopped(f"git worktree add: {made.stderr.strip()}")
            yield checkout
        finally:
            git(root, "worktree", "remove", "--force", str(checkout))
            signal.signal(signal.SIGTERM, on_termination)


def copy_suite(source: Path, folder: Path) -> Path:
    """Copy the benchmarks out of the package, so that they do not import it from this checkout."""
    folder.mkdir()
    for file in (*source.glob("test_*.py"), source / "conftest.py"):
        shutil.copy(file, folder)
    (folder / "pytest.ini").write_text("[pytest]\n")
    return folder


def run_suite(checkout: Path, suite: Path, only: str) -> Run:
    """Run the benchmarks in a fresh process that imports the package from a checkout.

    Raises:
        UserError: the checkout lacks the package, or no benchmark is selected.
        RunStopped: pytest ends without results.
    """
    with tempfile.TemporaryDirectory() as folder:
        times, report = Path(folder, "times.json"), Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", *PLUGINS, *TIMES, "-k", only]
        command += ["--benchmark-json", str(times), "--junit-xml", str(report)]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        environment |= {"PYTHONPATH": str(checkout), "UNIGRAD_COMPARED": str(checkout)}
        environment |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # other plugins could affect the times
        done = subprocess.run(command, cwd=suite, env=environment, capture_output=True, text=True)
        if done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED:
            raise UserError(f"only = {only}: matches no benchmark; `pytest --collect-only benchmarks` lists them")
        if done.returncode == pytest.ExitCode.USAGE_ERROR:
            said = [line.removeprefix("ERROR: ") for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
            raise UserError(f"{checkout}: {'; '.join(said)}")
        if done.returncode not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            raise RunStopped(f"pytest ended with status {done.returncode} on {checkout}:\n{done.stdout}{done.stderr}")
        return read_run(times, report)


def read_run(times: Path, report: Path) -> Run:
    """Read pytest's reports."""
    run = Run()
    for case in ElementTree.parse(report).iter("testcase"):
        for kind, where in (("skipped", run.skipped), ("failure", run.failed), ("error", run.failed)):
            if (found := case.find(kind)) is not None:
                where[case.get("name")] = found.get("message").strip().splitlines()[0]
    if times.exists() and (text := times.read_text()):
        run.seconds.update({each["name"]: each["stats"]["median"] for each in json.loads(text)["benchmarks"]})
    return run


def rows_of(runs: Mapping[str, list[Run]]) -> list[dict]:
    """A row per benchmark that ran on both sides in every round: the ratio, and each side's milliseconds."""
    sides = [[run.seconds for run in runs[side]] for side in (THIS, BASE)]
    names = [name for name in sides[0][0] if all(name in seconds for side in sides for seconds in side)]
    rows = []
    for name in names:
        this, base = ([seconds[name] * 1e3 for seconds in side] for side in sides)
        rows.append(ratio_row(name, base, this, this_ms=spread(this), base_ms=spread(base)))
    return rows


def show(console: Console, rows: list[dict], runs: Mapping[str, list[Run]]) -> None:
    """Print the ratios, and which benchmarks could not be compared and why."""
    headers = ("", "this, ms", "base, ms", "base / this", "range")
    table = table_of_figures(*headers, box=SIMPLE, pad_edge=False, collapse_padding=True)
    for row in rows:
        times = (f"{row[side]['median']:.3g}" for side in ("this_ms", "base_ms"))
        table.add_row(row["what"].removeprefix("test_"), *times, *median_and_range(row, digits=2))
    console.print(table)
    for side, kind in itertools.product(runs, ("skipped", "failed")):
        reasons = {name: why for run in runs[side] for name, why in getattr(run, kind).items()}
        for name, why in reasons.items():
            console.print(f"{kind} on {side}: {name.removeprefix('test_')}: {why}", soft_wrap=True)


def main(
    base: str, rounds: int = 5, only: str = "", output: Path = OUTPUT, root: Path = HERE.parents[1], suite: Path = HERE
) -> int:
    """Measure, print the table and append the rows.

    Args:
        base: the commit to compare with.
        rounds: number of rounds; in each, both sides run once.
        only: expression that selects benchmarks by name, like pytest's -k.
        output: folder of the rows.
        root: the checkout to compare.
        suite: folder of the benchmarks.

    Returns:
        The exit status: 1 if a benchmark fails on this checkout.

    Raises:
        UserError: `base` is not a commit or lacks the package; `output` is a file.
    """
    commit = find_commit(root, base)
    make_folder(output)
    console = new_console()
    here = git(root, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*").stdout.strip()
    with console.status("making the base's worktree") as status, checked_out(root, commit) as checkout:
        console.print(f"{THIS}: {here}, {root}", soft_wrap=True)
        console.print(f"{BASE}: {commit[:12]} ({base}), {checkout}", soft_wrap=True)
        copied = copy_suite(suite, checkout.parent / "benchmarks")
        sides = {BASE: checkout, THIS: root}  # base first, so that a commit without the package fails immediately
        blocks = {side: partial(run_suite, where, copied, only) for side, where in sides.items()}
        runs = take_turns(blocks, rounds, report=status.update)
    rows = rows_of(runs)
    show(console, rows, runs)
    if rows:
        common = {"this": here, "base": commit[:12], "rounds": rounds}
        path = append(output, "compare", [{**common, **row} for row in rows])
        console.print(f"above 1 this checkout is faster; rows appended to {path}", soft_wrap=True)
    else:
        console.print("nothing could be compared")
    return 1 if any(run.failed for run in runs[THIS]) else 0


if __name__ == "__main__":
    sys.exit(script.run(main))
