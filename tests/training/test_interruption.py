"""A run that is killed, preempted or restarted ends with the numbers it would have had, bit for bit."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
from command_process import start_ranks
from drawn_images import draw_tree
from forked import start
from interrupted_run import DEADLINE, EVERY_STEP, RECIPE, Run, disturb, losses, require_equal, steps_logged
from small_disks import mounted
from thin import thin

from unigrad_fast.checkpoints.files import Reader, latest
from unigrad_fast.config import resolve
from unigrad_fast.runtime.run_folder import RunFolder
from unigrad_fast.training.trainer import Trainer

EPOCHS, STEPS_PER_EPOCH = 8, 3
LAST = EPOCHS * STEPS_PER_EPOCH


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("data")
    draw_tree(root / "train", per_class=48)
    (root / "recipe.yaml").write_text(RECIPE.format(batch=32, epochs=EPOCHS))
    return root


@pytest.fixture(scope="module")
def undisturbed(data, tmp_path_factory) -> Path:
    """The run of two ranks that nobody interrupts."""
    output = tmp_path_factory.mktemp("runs") / "undisturbed"
    statuses, said = Run(data, output, 2, "--checkpoint.every", "4").end()
    assert statuses == [0, 0], said
    return output


@pytest.mark.timeout(1200)
def test_a_run_killed_five_times_ends_bitwise_as_if_it_had_not_been(data, undisturbed, tmp_path):
    output = tmp_path / "run"
    assert disturb(lambda: Run(data, output, 2, *EVERY_STEP), output, random.Random(7), kills=5) >= 2
    assert 0 < steps_logged(output) < LAST
    statuses, said = Run(data, output, 2).end()
    assert statuses == [0, 0], said
    assert "resuming after step" in said
    assert not list((output / "checkpoints").glob(".*"))
    require_equal(output, undisturbed, LAST)


SIGNALS = [(signal.SIGUSR1, [1], 75), (signal.SIGINT, [0, 1], 130)]  # tests/runtime/test_preemption.py: every one


def test_a_signal_saves_and_ends_all_ranks_and_the_run_resumes_bitwise(data, undisturbed, tmp_path):
    output, saved = tmp_path / "run", []
    for number, ranks, status in SIGNALS:
        run, began = Run(data, output, 2), steps_logged(output)
        assert run.wait_for(lambda: steps_logged(output) >= began + 2)  # noqa: B023
        run.signal(number, ranks)
        statuses, said = run.end()
        assert statuses == [status, status], said
        word = "interrupted" if number == signal.SIGINT else "preempted"
        saved.append(Reader(latest(output)).about["step"])
        assert said.count(f"{word}: saved after step {saved[-1]}; the same command resumes from there") == 2
        assert "Traceback" not in said
        if status == 75:
            assert (output / "preempted.txt").read_text().startswith("status 75: saved after step ")
    assert saved == sorted(set(saved)) and saved[-1] < LAST
    statuses, said = Run(data, output, 2).end()
    assert statuses == [0, 0], said
    assert not (output / "preempted.txt").exists()
    require_equal(output, undisturbed, LAST)
    again = Run(data, output, 2).end()
    assert again[0] == [0, 0] and "complete; there is nothing left to do" in again[1]


def rank_of(arguments: list[str]) -> None:
    from unigrad_fast.cli import main

    sys.exit(main(arguments))  # a function that returns would wait for the other ranks


def under_torchruns_agent(arguments: list[str]) -> None:
    """What `torchrun --standalone --nproc_per_node 2 --max-restarts 2` does, but that it forks its ranks."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    one = {"min_nodes": 1, "max_nodes": 1, "nproc_per_node": 2, "start_method": "fork"}
    meeting = {"run_id": "restarted", "rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "monitor_interval": 0.1}
    with thin():
        elastic_launch(LaunchConfig(**one, **meeting, max_restarts=2), rank_of)(arguments)


@pytest.mark.slow  # two ranks under torchrun, and killed ranks, are tried apart in the default run
def test_torchruns_agent_restarts_a_killed_rank_and_the_run_goes_on(data, undisturbed, tmp_path):
    output = tmp_path / "run"
    given = ("--recipe", data / "recipe.yaml", "--data.train", data / "train", "--output", output)
    words = ["pretrain", *map(str, given), "--checkpoint.every", "1"]
    agent = start(under_torchruns_agent, words, has_children=True)
    try:
        end = time.monotonic() + DEADLINE
        while steps_logged(output) < 7:
            assert agent.is_alive() and time.monotonic() < end
            time.sleep(0.01)
        *_, last = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
        os.kill(int(last), signal.SIGKILL)
        agent.join(DEADLINE)
    finally:
        agent.terminate()
    assert agent.exitcode == 0
    assert "resuming after step" in (output / "log.txt").read_text()
    require_equal(output, undisturbed, LAST)


def test_a_folder_in_use_is_refused(data, tmp_path):
    run = Run(data, tmp_path / "run")
    assert run.wait_for(lambda: steps_logged(tmp_path / "run") >= 1)
    statuses, said = Run(data, tmp_path / "run").end()
    run.signal(signal.SIGKILL)
    run.end()
    assert statuses == [2] and "another process is training in this folder" in said and "Traceback" not in said


def test_a_run_killed_before_its_first_checkpoint_starts_again(data, tmp_path):
    run = Run(data, tmp_path / "run")
    assert run.wait_for(lambda: steps_logged(tmp_path / "run") >= 2)
    run.signal(signal.SIGKILL)
    run.end()
    statuses, said = Run(data, tmp_path / "run", 1, "--seed", "5").end()
    assert statuses == [2] and f"seed = 5: the run in {tmp_path / 'run'} has 0" in said
    for name in ("summary.json", "curves.png", "bad_images.jsonl"):  # as if it had come that far
        (tmp_path / "run" / name).write_text("{}")
    events = tmp_path / "run/tensorboard/events.out.tfevents.17.host"
    events.parent.mkdir()
    events.write_text("")
    log = (tmp_path / "run/log.txt").read_text()
    with (tmp_path / "run/metrics.jsonl").open("a") as file:
        file.write('{"event": "warning", "step": 0, "epoch": 0.0, "message": "of the attempt before"}\n')
    run = Run(data, tmp_path / "run")
    assert run.wait_for(lambda: steps_logged(tmp_path / "run") >= 4)
    run.signal(signal.SIGTERM)
    statuses, said = run.end()
    assert statuses == [75] and "starting over: the previous attempt in this folder saved no checkpoint" in said
    assert [step for step, *_ in losses(tmp_path / "run")][:4] == [1, 2, 3, 4]
    assert "of the attempt before" not in (tmp_path / "run/metrics.jsonl").read_text()
    assert not {"summary.json", "curves.png", "bad_images.jsonl"} & {path.name for path in (tmp_path / "run").iterdir()}
    assert not events.exists()
    whole_log = (tmp_path / "run/log.txt").read_text()
    assert whole_log.startswith(log) and "starting over" in whole_log.removeprefix(log)


def test_runs_without_a_folder_that_start_at_once_take_one_each_on_all_ranks(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(f"recipe: {data}/recipe.yaml\nschedule: {{epochs: 1}}\n")
    words = ("pretrain", "--recipe", tmp_path / "mine.yaml", "--data.train", data / "train")
    runs = [start_ranks(ranks, *words, is_thin=True) for ranks in (1, 2)]
    results = [process.end(DEADLINE) for processes in runs for process in processes]
    assert [result.returncode for result in results] == [0, 0, 0], results
    folders = [tmp_path / "runs" / name for name in ("mine", "mine-2")]
    assert sorted((tmp_path / "runs").iterdir()) == folders
    assert {len(list(latest(folder).glob("rank-*.pt"))) for folder in folders} == {1, 2}
    for folder in folders:
        config = resolve(folder / "config.yaml")
        assert (config.output, config.recipe) == (folder, "cifar_subset")


def test_a_run_folder_that_cannot_be_written_ends_the_run_with_its_name(data, tmp_path):
    """A file comes to stand where the checkpoints' folder has to be: a test that runs as root sees that too."""
    output = tmp_path / "run"
    run = Run(data, output)
    assert run.wait_for(lambda: steps_logged(output) >= 1)
    (output / "checkpoints").write_text("")
    run.signal(signal.SIGTERM)
    statuses, said = run.end()
    assert statuses == [3] and f"{output}/checkpoints" in said and "cannot be written" in said
    assert "there is no earlier one: the same command starts over" in said
    assert "Traceback" not in said
    statuses, said = Run(data, output).end()
    assert statuses == [2] and "checkpoints is a file, but must be a folder; move it away" in said


def test_a_full_disk_stops_a_run_which_goes_on_once_there_is_room(data, undisturbed, tmp_path):
    checkpoint = sum(file.stat().st_size for file in latest(undisturbed).iterdir())
    with mounted(tmp_path / "disk", 5 * checkpoint // 2) as disk:  # for two of them
        statuses, said = Run(data, disk / "run", 2, *EVERY_STEP).end()
        assert statuses == [3, 3], said
        assert "cannot be written: No space left on device; earlier ones are unchanged" in said
        assert "Traceback" not in said
        assert Reader(latest(disk / "run")).about["step"] == 2
        assert "little space" not in said
        subprocess.run(["mount", "-o", f"remount,size={7 * checkpoint // 2}", disk], check=True)
        statuses, said = Run(data, disk / "run", 2).end()
        assert statuses == [0, 0] and "resuming after step 2" in said, said
        assert f"free on the disk of {disk}/run" in said  # less than two, of which the run needs one
        require_equal(disk / "run", undisturbed, LAST)


@contextmanager
def without_pointer() -> Iterator[None]:
    """Somebody removes `latest`, or wrote nothing into it, before each step."""
    original = Trainer.step

    def step(trainer: Trainer, number: int, batches: Iterator) -> float:
        pointer = RunFolder(trainer.config.output).checkpoints / "latest"
        pointer.write_text("") if number % 2 else pointer.unlink(missing_ok=True)
        return original(trainer, number, batches)

    with mock.patch.object(Trainer, "step", step):
        yield


def test_a_damaged_checkpoint_is_refused_and_passed_over_when_told_so(data, undisturbed, tmp_path):
    output = tmp_path / "run"
    shutil.copytree(undisturbed, output)
    (output / "summary.json").unlink()
    file = latest(output) / "rank-00001.pt"
    content = bytearray(file.read_bytes())
    content[len(content) // 3] ^= 1
    file.write_bytes(content)
    statuses, said = Run(data, output).end()
    assert statuses == [2] and f"{file}: damaged" in said and "Traceback" not in said
    (output / "checkpoints/latest").write_text("")
    statuses, said = Run(data, output, 2, "--fall_back", "true", *EVERY_STEP, inside=[without_pointer]).end()
    assert statuses == [0, 0] and f"WARNING: {file}: damaged" in said, said
    assert "latest: names nothing, which does not exist; ignored, resuming from step" in said
    require_equal(output, undisturbed, LAST)
