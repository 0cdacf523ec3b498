"""How a run ended is known from its folder, whatever a launcher makes of the status; and ranks leave together."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest
from command_process import CommandProcess, free_port
from test_interruption import DEADLINE, RECIPE, Run, draw_tree, steps_logged

from unigrad_fast import __main__, cli
from unigrad_fast.checkpoints.files import Reader, latest
from unigrad_fast.runtime.errors import Preempted, RunStopped
from unigrad_fast.runtime.run_folder import RunFolder

ROOT = Path(__file__).resolve().parents[2]
RESTARTED = {"TORCHELASTIC_RESTART_COUNT": "1"}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("data")
    draw_tree(root / "train", per_class=48)
    (root / "recipe.yaml").write_text(RECIPE.format(batch=32, epochs=200))
    return root


def given(data: Path, output: Path) -> tuple:
    return "pretrain", "--recipe", data / "recipe.yaml", "--data.train", data / "train", "--output", output


def slurm_step(*arguments: object) -> list[CommandProcess]:
    """The tasks of a step on one machine, with the variables that srun would set."""
    step = {"SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}
    step |= {"SLURM_JOB_NODELIST": "localhost", "MASTER_PORT": str(free_port())}
    tasks = [{**step, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)]
    return [CommandProcess(*arguments, environment=task, is_thin=True) for task in tasks]


def end_as_srun_does(tasks: list[CommandProcess]) -> tuple[int, str]:
    """The status of `srun --kill-on-bad-exit=1`, which kills the others once one has failed, and what all said."""
    until = time.monotonic() + DEADLINE
    while not any(task.has_ended() for task in tasks):
        assert time.monotonic() < until
        time.sleep(0.0005)
    for task in tasks:
        with suppress(ProcessLookupError):
            task.signal(signal.SIGKILL)
    results = [task.end(DEADLINE) for task in tasks]
    statuses = [128 - result.returncode if result.returncode < 0 else result.returncode for result in results]
    return max(statuses), "".join(result.stdout + result.stderr for result in results)


def job_script() -> str:
    """The one of the page on preemption."""
    page = (ROOT / "docs/resume.md").read_text(encoding="utf-8")
    block = re.search(r"(?ms)^    #!/bin/bash\n(?:    .*\n)*?    exit \$status\n", page)
    return re.sub(r"(?m)^    ", "", block[0])


def requeued(folder: Path, left: str, status: int) -> tuple[bool, int]:
    """Whether the page's script queues its job again where srun leaves this in the run's folder, and its status."""
    (folder / "bin").mkdir()
    (folder / "runs/imagenet").mkdir(parents=True)
    (folder / "runs/imagenet/preempted.txt").write_text("status 75: of an attempt before\n")
    for name, does in (("srun", f"{left}; exit {status}"), ("scontrol", "echo $@ > requeued")):
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{does}\n")
        (folder / "bin" / name).chmod(0o755)
    environment = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "SLURM_JOB_ID": "17"}
    result = subprocess.run(["bash", "-c", job_script()], cwd=folder, env=environment, timeout=60)
    asked = folder / "requeued"
    assert not asked.exists() or asked.read_text() == "requeue 17\n"
    return asked.exists(), result.returncode


def test_ranks_that_srun_kills_once_one_has_left_are_preempted_all_the_same(data, tmp_path):
    output = tmp_path / "run"
    tasks = slurm_step(*given(data, output))
    while steps_logged(output) < 2:
        assert not any(task.has_ended() for task in tasks), [task.end().stderr for task in tasks]
        time.sleep(0.005)
    tasks[1].signal(signal.SIGUSR1)
    status, said = end_as_srun_does(tasks)
    step = Reader(latest(output)).about["step"]
    assert status in (75, 128 + signal.SIGKILL), said
    text = f"status 75: saved after step {step}; the same command resumes from there\n"
    assert (output / "preempted.txt").read_text() == text
    assert not [path for path in (output / "checkpoints").iterdir() if path.name.startswith(".")]
    # Torchrun, to which it was a failure, would start them again.
    again = [CommandProcess(*given(data, output), environment=RESTARTED, is_thin=True).end(DEADLINE)]
    assert [each.returncode for each in again] == [75]
    assert again[0].stderr == f"preempted: saved after step {step}; the same command resumes from there\n"
    assert (output / "preempted.txt").read_text() == text and Reader(latest(output)).about["step"] == step


def test_a_run_whose_rank_was_killed_names_it_and_is_no_deliberate_stop(data, tmp_path):
    output = tmp_path / "run"
    run = Run(data, output, 2, "--engine.timeout", "1")
    assert run.wait_for(lambda: steps_logged(output) >= 1)
    run.signal(signal.SIGKILL, [1])
    statuses, said = run.end()
    assert statuses == [3, -signal.SIGKILL], said
    assert f"stopped: rank 1 on {socket.gethostname()} no longer answers, last heard from at " in said
    assert "Traceback" not in said
    assert f"  stopped: rank 1 on {socket.gethostname()} " in (output / "log.txt").read_text().splitlines()[-1]
    assert not (output / "stopped.txt").exists(), "a launcher that starts the ranks again does right"


@pytest.mark.parametrize(
    ("left", "status", "again"),
    [
        ("echo 'status 75: saved' > runs/imagenet/preempted.txt", 137, True),
        ("echo 'status 75: saved' > runs/imagenet/preempted.txt", 75, True),
        ("echo 'status 3: stopped' > runs/imagenet/stopped.txt", 137, False),
        ("true", 2, False),
        ("true", 0, False),
    ],
)
def test_the_job_script_of_the_page_queues_a_preempted_run_again_and_no_other(left, status, again, tmp_path):
    assert requeued(tmp_path, left, status) == (again, status)


def test_a_restarted_rank_leaves_as_before_and_the_next_command_clears_what_was_noted(tmp_path):
    for status in (75, 130):
        RunFolder(tmp_path).note_preemption(status, "saved after\nstep 7")
        with pytest.raises(Preempted, match="saved after step 7") as error:
            RunFolder(tmp_path).clear_endings(RESTARTED)
        assert (error.value.status, str(error.value)) == (status, "saved after step 7")
    (tmp_path / "stopped.txt").write_text("status 3: 11 steps in a row had non-finite values\n")
    with pytest.raises(RunStopped, match="11 steps in a row"):
        RunFolder(tmp_path).clear_endings(RESTARTED)
    RunFolder(tmp_path).clear_endings({"TORCHELASTIC_RESTART_COUNT": "0"})
    assert list(tmp_path.iterdir()) == []
    RunFolder(tmp_path).clear_endings(RESTARTED)  # as after a rank that was killed


def test_files_of_these_names_that_are_somebody_elses_stay(tmp_path):
    (tmp_path / "stopped.txt").write_text("my notes")
    (tmp_path / "preempted.txt").write_bytes(b"\xff")
    RunFolder(tmp_path).note_preemption(75, "saved")
    RunFolder(tmp_path).clear_endings({})
    RunFolder(tmp_path).clear_endings(RESTARTED)
    assert (tmp_path / "stopped.txt").read_text() == "my notes"
    assert (tmp_path / "preempted.txt").read_bytes() == b"\xff"


@pytest.mark.parametrize("status", [0, 2, 3, 75, 130])
def test_a_process_that_has_saved_and_leaves_is_not_ended_by_the_launcher_that_saw_another_leave(status, monkeypatch):
    ignored = []
    monkeypatch.setattr(cli, "main", lambda: status)
    monkeypatch.setattr(__main__.signal, "signal", lambda *what: ignored.append(what))
    assert __main__.main() == status
    assert ignored == ([(signal.SIGTERM, signal.SIG_IGN)] if status in (75, 130) else [])


def test_a_run_preempted_before_it_has_a_folder_is_noted_too(tmp_path):
    RunFolder(tmp_path / "runs/a").note_preemption(75, "stopped before ranks connected")
    assert "preempted.txt" in os.listdir(tmp_path / "runs/a")
