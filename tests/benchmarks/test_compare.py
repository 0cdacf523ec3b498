"""The comparison with another commit: it measures what it says, on both sides, and leaves nothing behind."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from unigrad_fast.benchmarks.harness import script
from unigrad_fast.benchmarks.micro import compare

SUITE = """
def test_of_both(benchmark, public):
    double = public("unigrad_fast.arithmetic:double")
    assert benchmark(lambda: double(21)) == 42

def test_of_this_alone(benchmark, public):
    benchmark(lambda: public("unigrad_fast.arithmetic:triple")(14))

def test_of_an_installed_one_alone(benchmark, public):
    benchmark(lambda: public("unigrad_fast.objectives:UniGrad"))
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory) -> Path:
    """Three commits: without the package, tagged `before`; with `double`, tagged `base`; with `triple` besides."""
    root = tmp_path_factory.mktemp("repository")

    def commit(tag: str, **files: str) -> None:
        for name, text in files.items():
            path = root / f"unigrad_fast/{name}.py"
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        for words in (["add", "."], ["commit", "--allow-empty", "-m", tag], ["tag", tag]):
            identity = ["-c", "user.name=A", "-c", "user.email=a@example.org"]
            subprocess.run(["git", "-C", root, *identity, *words], check=True, capture_output=True)

    subprocess.run(["git", "init", root], check=True, capture_output=True)
    (root / ".gitignore").write_text("__pycache__\n")
    commit("before")
    commit("base", __init__="", arithmetic="def double(x):\n    return x + x\n")
    commit("this", arithmetic="def double(x):\n    return 2 * x\n\n\ndef triple(x):\n    return 3 * x\n")
    return root


@pytest.fixture
def suite(tmp_path) -> Path:
    """Two benchmarks, with the fixtures of ours."""
    folder = tmp_path / "suite"
    folder.mkdir()
    (folder / "test_arithmetic.py").write_text(SUITE)
    (folder / "conftest.py").write_text((compare.HERE / "conftest.py").read_text())
    return folder


def words(repository: Path, suite: Path, *more: object) -> list[str]:
    output = suite.parent / "results"
    return [str(word) for word in ("--root", repository, "--suite", suite, "--output", output, "--rounds", 1, *more)]


def only_the_checkout_is_left(repository: Path) -> bool:
    listed = subprocess.run(["git", "-C", repository, "worktree", "list"], capture_output=True, text=True).stdout
    return len(listed.splitlines()) == 1


def test_ratios_are_those_of_the_two_commits_and_a_missing_name_is_said(repository, suite, capsys):
    assert script.run(compare.main, words(repository, suite, "--base", "base")) == 0
    (row,) = [json.loads(line) for line in (suite.parent / "results/compare.jsonl").read_text().splitlines()]
    commit = compare.find_commit(repository, "base")[:12]
    assert row["what"] == "test_of_both" and row["base"] == commit
    assert row["base_ms"]["median"] / row["this_ms"]["median"] == pytest.approx(row["median"])
    shown = capsys.readouterr().out
    assert f"base: {commit} (base), " in shown and str(repository) in shown
    assert "skipped on base: of_this_alone: unigrad_fast.arithmetic:triple does not exist" in shown
    for side in ("this checkout", "base"):
        assert f"skipped on {side}: of_an_installed_one_alone: unigrad_fast.objectives:UniGrad does not exist" in shown
    assert only_the_checkout_is_left(repository)


def test_an_installed_package_is_not_measured_in_place_of_one_that_the_base_lacks(repository, suite, capsys):
    assert script.run(compare.main, words(repository, suite, "--base", "before")) == 2
    assert "package unigrad_fast not found; give a commit that has it" in capsys.readouterr().err
    assert only_the_checkout_is_left(repository)


@pytest.mark.parametrize(("base", "said"), [("nonsense", "BASE = nonsense: not a commit"), ("", "BASE is not given")])
def test_what_is_no_commit_is_refused_with_the_remedy(base, said, repository, suite, capsys):
    assert script.run(compare.main, words(repository, suite, "--base", base)) == 2
    error = capsys.readouterr().err
    assert said in error and "give a hash, a branch or a tag" in error
    assert not (suite.parent / "results").exists()


def test_a_failing_benchmark_is_listed_and_ends_with_status_1(repository, suite, capsys):
    (suite / "test_arithmetic.py").write_text("def test_broken(benchmark):\n    benchmark(lambda: 1 / 0)\n")
    assert script.run(compare.main, words(repository, suite, "--base", "base")) == 1
    assert "failed on this checkout: broken: ZeroDivisionError" in capsys.readouterr().out
    assert only_the_checkout_is_left(repository)


def test_the_worktree_is_removed_when_it_is_terminated(repository, suite):
    """The benchmark itself ends the process that compares."""
    (suite / "test_arithmetic.py").write_text(
        f"import os, signal\ndef test_ending():\n    os.kill(os.getppid(), {int(signal.SIGTERM)})\n    signal.pause()\n"
    )
    module = "unigrad_fast.benchmarks.micro.compare"
    command = [sys.executable, "-m", module, *words(repository, suite, "--base", "base")]
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert only_the_checkout_is_left(repository)
