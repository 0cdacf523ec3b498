"""Comparisons that run: killed, interrupted, with a failing member, side by side, extended, and as a SLURM array."""

from __future__ import annotations

import csv
import json
import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from command_process import CommandProcess
from comparisons import comparison, start_comparison
from interrupted_run import steps_logged, wait_for

from unigrad_fast import cli
from unigrad_fast.checkpoints.files import Reader, latest
from unigrad_fast.comparison import pictures, session, timing
from unigrad_fast.comparison.folder import ComparisonFolder
from unigrad_fast.comparison.members import Asked
from unigrad_fast.config import resolve
from unigrad_fast.runtime.shell import typed

STEPS = 6
THREE = ("--methods", "unigrad,moco,byol")
NAMES = [f"{name}-seed-0" for name in ("unigrad", "moco", "byol")]


@pytest.fixture(scope="module")
def undisturbed(recipe, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "cmp"
    done = comparison(folder, "--recipe", recipe, *THREE, draws=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 of 3 members done, 100 %, left 0:00:00" in done.stdout
    return folder


def tables(folder: Path) -> dict[str, str]:
    return {
        kind: path.read_text().replace(str(folder), "CMP") for kind, path in ComparisonFolder(folder).tables.items()
    }


def require_same(folder: Path, undisturbed: Path, names: list[str]) -> None:
    """Metrics of every step, the tensors of the last checkpoint and the tables, bit for bit."""
    for name in names:
        assert metrics(folder / name) == metrics(undisturbed / name)
        assert [step for step, *_ in metrics(folder / name)] == list(range(1, STEPS + 1))
        one, other = Reader(latest(folder / name)), Reader(latest(undisturbed / name))
        assert one.names == other.names
        assert all(torch.equal(one.tensor(tensor), other.tensor(tensor)) for tensor in one.names)
    assert tables(folder) == tables(undisturbed)


def metrics(run: Path) -> list[tuple]:
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    names = ("step", "loss", "positive_cosine", "feature_std", "gradient_norm")
    return [tuple(event[name] for name in names) for event in events if event["event"] == "train"]


def logged(folder: Path) -> int:
    """Steps of all members."""
    return sum(steps_logged(run) for run in folder.glob("*-seed-*"))


def children(process: CommandProcess) -> list[int]:
    pid = process._process.pid
    return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def disturb(folder: Path, chance: random.Random, kills: int, words: tuple[object, ...]) -> None:
    """Start a comparison so often, and kill it each time somewhere, every second time together with its members."""
    for kill in range(kills):
        process, began = start_comparison(folder, *words), logged(folder)
        wanted = began + chance.randint(1, STEPS)
        wait_for([process], lambda: logged(folder) >= wanted)  # noqa: B023
        time.sleep(chance.uniform(0, 0.3))
        assert not process.has_ended(), process.end()
        members = children(process) if kill % 2 else []
        process.signal(signal.SIGKILL)
        for member in members:
            os.kill(member, signal.SIGKILL)
        assert process.end().returncode == -signal.SIGKILL


def test_members_begin_alike_and_each_is_a_run_of_its_own_command(undisturbed, recipe):
    summaries = [json.loads((undisturbed / name / "summary.json").read_text()) for name in NAMES]
    assert len({summary["knn_first"] for summary in summaries}) == 1
    for name in NAMES:
        assert (undisturbed / "logs" / f"{name}.txt").read_text().endswith("\nexit status 0\n")
    tree = json.loads((undisturbed / "table.json").read_text())
    assert [row["figures"]["kNN"]["values"] for row in tree["rows"]] == [{"0": each["knn_last"]} for each in summaries]
    assert [row["paper"] for row in tree["rows"]] == [{"linear": 70.3}, {"linear": 70.0}, {"linear": 70.3}]


def test_a_comparison_draws_what_its_members_reported(undisturbed):
    assert sorted(path.stem for path in undisturbed.glob("*.png")) == ["accuracy", "minutes", "trajectories"]
    for name in ("trajectories", "accuracy", "minutes"):
        with (undisturbed / f"{name}.csv").open() as file:
            assert {each["row"] for each in csv.DictReader(file)} == {"unigrad", "moco", "byol"}
        assert "16 validation images" in (undisturbed / f"{name}.svg").read_text()


def test_pictures_that_cannot_be_drawn_cost_no_comparison(undisturbed, capsys, monkeypatch):
    def draw(*_):
        raise OSError("no space left")

    monkeypatch.setattr(pictures, "draw", draw)
    assert cli.main(["compare", str(undisturbed), "--tables_only", "true"]) == 0
    said = capsys.readouterr().out
    assert "WARNING: pictures are missing (OSError: no space left)" in said and "table.md" in said


@pytest.mark.long
def test_a_comparison_killed_twice_ends_bitwise_as_if_it_had_not_been(undisturbed, recipe, tmp_path):
    folder = tmp_path / "cmp"
    disturb(folder, random.Random(3), 2, ("--recipe", recipe, *THREE))
    done = comparison(folder, "--recipe", recipe, *THREE)
    assert done.returncode == 0, done.stdout + done.stderr
    require_same(folder, undisturbed, NAMES)


@pytest.mark.slow  # twenty members, twice
@pytest.mark.timeout(1200)
def test_twenty_members_killed_at_five_places_end_bitwise_as_if_they_had_not_been(recipe, tmp_path):
    words = (
        "--recipe",
        recipe,
        "--methods",
        "unigrad,moco,byol,simclr,barlow_twins",
        "--seeds",
        "0,1,2,3",
        "--jobs",
        "2",
    )
    whole = comparison(tmp_path / "undisturbed/cmp", *words)
    assert whole.returncode == 0, whole.stdout + whole.stderr
    folder = tmp_path / "cmp"
    disturb(folder, random.Random(11), 5, words)
    done = comparison(folder, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    names = [path.name for path in (tmp_path / "undisturbed/cmp").glob("*-seed-*")]
    assert len(names) == 20
    require_same(folder, tmp_path / "undisturbed/cmp", names)


def test_ctrl_c_ends_the_member_by_its_own_saving_and_the_comparison_with_its_status(undisturbed, recipe, tmp_path):
    folder = tmp_path / "cmp"
    process = start_comparison(folder, "--recipe", recipe, *THREE)
    wait_for([process], lambda: logged(folder) >= 2)
    process.signal(signal.SIGINT)
    ended = process.end()
    assert ended.returncode == 130, ended.stdout + ended.stderr
    assert "interrupted: the members have saved; the same command continues the comparison" in ended.stderr
    (log,) = (folder / "logs").glob("*.txt")
    assert "interrupted: saved after step" in log.read_text() and log.read_text().endswith("\nexit status 130\n")
    assert "not finished: seed 0" in (folder / "table.md").read_text()
    again = comparison(folder)  # which is what the folder says
    assert again.returncode == 0, again.stdout + again.stderr
    require_same(folder, undisturbed, NAMES)


def test_what_is_done_is_not_done_again_and_other_seeds_are_added(undisturbed, recipe, tmp_path):
    folder = tmp_path / "cmp"
    shutil.copytree(undisturbed, folder)
    written = {path: path.stat().st_mtime_ns for path in folder.glob("*-seed-*/summary.json")}
    assert len(written) == 3
    for run in folder.glob("*-seed-*"):  # as if it had been trained there
        file = run / "config.yaml"
        file.write_text(file.read_text().replace(str(undisturbed), str(folder)))
    again = comparison(folder, "--recipe", recipe, *THREE)
    assert again.returncode == 0 and "training" not in again.stdout
    more = comparison(folder, "--recipe", recipe, *THREE, "--seeds", "0,1", "--jobs", "2")
    assert more.returncode == 0, more.stdout + more.stderr
    assert {path: path.stat().st_mtime_ns for path in written} == written
    assert len(list(folder.glob("*-seed-1/summary.json"))) == 3
    assert "| unigrad " in (text := (folder / "table.md").read_text()) and text.count("2 of 2") == 3
    for words, said in (
        (("--methods", "unigrad,moco,byol"), "its comparison has unigrad-seed-1 and 2 more, which this one lacks"),
        ((*THREE, "--seeds", "0,1", "--schedule.epochs", "3"), "schedule.epochs = 3: the comparison in"),
        (
            (*THREE, "--seeds", "0,1", "--data.val", recipe.parent / "train"),
            f"data.val = {recipe.parent / 'train'}: the co",
        ),
    ):
        refused = comparison(folder, "--recipe", recipe, *words)
        assert refused.returncode == 2 and f"error: {'folder = ' if 'lacks' in said else ''}" in refused.stderr
        assert said in refused.stderr, refused.stderr


def test_a_failed_member_is_a_line_with_its_reason_and_the_rest_goes_on(recipe, tmp_path):
    words = ("--recipe", recipe, "--engine.max_skipped_steps", "1", "--sweep.optimizer.base_lr", "1e30,0.1")
    done = comparison(tmp_path / "cmp", *words)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "stopped: 1 of 2 members failed: base_lr-1e30-seed-0; the same command tries again" in done.stderr
    failed, other = json.loads((tmp_path / "cmp/table.json").read_text())["rows"]
    assert failed["row"] == "base_lr 1e30" and "values" in failed["failed"]["0"]
    assert failed["figures"]["kNN"]["mean"] is None and other["figures"]["kNN"]["mean"] > 0
    assert (tmp_path / "cmp/base_lr-0.1-seed-0/summary.json").is_file()


def test_a_second_comparison_in_a_folder_is_refused(recipe, tmp_path):
    folder = tmp_path / "cmp"
    first = start_comparison(folder, "--recipe", recipe, *THREE)
    wait_for([first], lambda: logged(folder) >= 1)
    second = comparison(folder, "--recipe", recipe, *THREE)
    first.signal(signal.SIGTERM)
    assert second.returncode == 2
    assert f"error: folder = {folder}: another process compares in this folder; end it first" in second.stderr
    assert first.end().returncode == 75


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("table.md", "holds no comparison, but table.md"),
        ("trajectories.csv", "holds no comparison, but trajectories.csv"),
        ("comparison.yaml", "is no comparison"),
        ("config.yaml", "holds a run"),
    ],
)
def test_other_peoples_files_are_not_replaced(name, said, undisturbed, recipe, tmp_path, capsys):
    content = (undisturbed / NAMES[0] / "config.yaml").read_text() if name == "config.yaml" else "mine"
    (tmp_path / name).write_text(content)
    assert cli.main(["compare", str(tmp_path), "--recipe", str(recipe), *THREE]) == 2
    assert said in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [name] and (tmp_path / name).read_text() == content


PROGRAM = """#!/bin/bash
printf '%s\\n' "$@"
trap 'exit 75' TERM
if [ "$WAIT" ]; then touch "$WAIT"; while :; do sleep 0.01; done; fi
exit 3
"""


def test_a_slurm_script_has_an_index_for_each_member_and_logs_its_status(recipe, tmp_path):
    found = Asked(methods=("unigrad", "c"), seeds=(0, 1), common={"recipe": str(recipe)}).members(tmp_path / "it's")
    folder = ComparisonFolder(tmp_path / "it's")
    folder.logs.mkdir(parents=True)
    text = session.script(found, folder)
    assert "#SBATCH --array=0-3\n" in text
    file = tmp_path / "array.sh"
    file.write_text(text)
    assert subprocess.run(["bash", "-n", str(file)], capture_output=True).returncode == 0
    program = tmp_path / "program"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    commands = [line.partition("command=(")[2] for line in text.splitlines() if "command=(" in line]
    start = commands[0].partition(" pretrain ")[0]
    file.write_text(text.replace(f"command=({start} ", f"command=({program} "))
    for number, member in enumerate(found):
        ended = subprocess.run(["bash", str(file)], env={**os.environ, "SLURM_ARRAY_TASK_ID": str(number)})
        said = folder.log(member).read_text().splitlines()
        assert ended.returncode == 3
        assert tuple(said[:-2]) == member.words and said[-1] == "exit status 3"
    waits = {**os.environ, "SLURM_ARRAY_TASK_ID": "1", "WAIT": str(tmp_path / "waits")}
    with subprocess.Popen(["bash", str(file)], env=waits) as process:
        while not (tmp_path / "waits").exists():
            time.sleep(0.01)
        process.terminate()
    assert process.returncode == 75
    assert folder.log(found[1]).read_text().endswith("\nexit status 75\n")
    assert (
        subprocess.run(
            ["bash", str(file)], env={**os.environ, "SLURM_ARRAY_TASK_ID": "9"}, capture_output=True
        ).returncode
        == 2
    )


def test_the_script_is_written_and_nothing_runs(recipe, tmp_path, capsys):
    words = ["compare", str(tmp_path / "cmp"), "--recipe", str(recipe), *THREE, "--slurm", str(tmp_path / "array.sh")]
    assert cli.main(words) == 0
    assert (tmp_path / "array.sh").read_text().count("command=(") == 3
    assert not list((tmp_path / "cmp").glob("*-seed-*"))
    assert cli.main(["compare", str(tmp_path / "cmp"), "--tables_only", "true"]) == 0
    assert (tmp_path / "cmp/table.md").read_text().count("not finished: seed 0") == 3
    assert cli.main(words) == 0  # the same content
    assert cli.main([*words, "--seeds", "0,1"]) == 2
    assert "already exists" in capsys.readouterr().err


def test_a_member_that_another_process_trains_is_waited_for(recipe, undisturbed, tmp_path):
    folder = tmp_path / "cmp"
    (member, *_) = Asked(methods=("unigrad", "moco", "byol"), common={"recipe": str(recipe)}).members(folder)
    alone = CommandProcess(*member.words, "--engine.threads", "1", is_thin=True)
    wait_for([alone], lambda: steps_logged(member.config.output) >= 1)
    alone.signal(signal.SIGSTOP)
    process = start_comparison(folder, "--recipe", recipe, *THREE)
    wait_for([process], lambda: all((folder / name / "summary.json").is_file() for name in NAMES[1:]))
    alone.signal(signal.SIGCONT)
    ended = process.end()
    assert alone.end().returncode == 0 and ended.returncode == 0, ended.stdout + ended.stderr
    assert "unigrad-seed-0 is being trained by another process; waiting for it" in ended.stdout
    require_same(folder, undisturbed, NAMES)


def test_a_dry_run_lists_members_commands_and_times_and_writes_nothing(recipe, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(timing, "seconds", lambda config: 60.0 * config.model.projector.depth)
    words = ["--recipe", str(recipe), "--sweep.model.projector.depth", "1,3", "--seeds", "0,1", "--dry_run", "true"]
    assert cli.main(["compare", str(tmp_path / "cmp"), *words]) == 0
    said = capsys.readouterr().out
    for member in Asked(
        sweep={"model.projector.depth": ["1", "3"]}, seeds=(0, 1), common={"recipe": str(recipe)}
    ).members(tmp_path / "cmp"):
        assert f"{member.name}: " in said and typed(*member.words) in said
    assert "depth-1: about 0:01:00 per member" in said and "depth-3: about 0:03:00 per member" in said
    assert "4 members: about 0:08:00 one after another" in said
    assert not (tmp_path / "cmp").exists()


@pytest.mark.slow  # a fresh interpreter
def test_the_time_of_a_member_grows_with_its_epochs(recipe):
    short, long = (resolve(recipe, {"schedule.epochs": epochs}) for epochs in (2, 2000))
    assert 0 < timing.seconds(short) < timing.seconds(long)
