"""`pretrain` from Python: the run of the command, told of what happens, ended and resumed by its caller."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
from pathlib import Path
from unittest import mock

import pytest
import yaml
from command_process import CommandProcess
from tiny_run import LAST, require_equal, tiny

from unigrad_fast import Preempted, Run, StopRun, UserError, pretrain
from unigrad_fast.config import resolve
from unigrad_fast.runtime import preemption
from unigrad_fast.runtime.preemption import SIGNALS


@pytest.mark.long
def test_python_and_the_shell_train_the_same_run_bit_for_bit(finished, settings, tmp_path):
    resolved = resolve("cifar_subset", {key: value for key, value in settings.items() if key != "recipe"})
    (tmp_path / "same.yaml").write_text(yaml.safe_dump(resolved.model_dump(mode="json")))
    given = ("--recipe", tmp_path / "same.yaml", "--output", tmp_path / "run")
    result = CommandProcess("pretrain", *given, inside=[tiny]).end()
    assert result.returncode == 0, result.stderr
    require_equal(Run(tmp_path / "run"), finished)


def test_ways_to_give_settings_are_one(finished, settings, tmp_path):
    (tmp_path / "mine.yaml").write_text(finished.path.joinpath("config.yaml").read_text())
    before = resolve(tmp_path / "mine.yaml", {"output": tmp_path})
    nested = {**settings, "model": {"projector": {"width": 32}}}
    del nested["model.projector.width"]
    dotted = {f"data.{key}": str(value) for key, value in settings["data"].items()}
    for given in (settings, nested, {**settings, "data": {}, **dotted}, {"recipe": tmp_path / "mine.yaml"}):
        with mock.patch("unigrad_fast.training.loop.pretrain", return_value=finished.path) as called:
            assert pretrain(**given, output=tmp_path).path == finished.path
        assert called.call_args[0][0] == before


def test_a_mistake_is_told_as_to_the_command_line(settings, tmp_path):
    with pytest.raises(UserError, match=r"^data\.bach_size = 4: unknown key; did you mean data\.batch_size\?$"):
        pretrain(**settings, **{"data.bach_size": 4}, output=tmp_path / "run")
    with pytest.raises(UserError, match=r"^data\.batch_size: given twice, as 32 and as 64; give it once$"):
        pretrain(**settings, **{"data.batch_size": 64}, output=tmp_path / "run")
    with pytest.raises(UserError, match=r"^data\.train = .*: no such file or folder; "):
        pretrain(**{**settings, "data": {"train": tmp_path / "none"}}, output=tmp_path / "run")
    with pytest.raises(UserError, match="print_config"):
        pretrain(**settings, print_config=True)
    with pytest.raises(UserError, match=r"^on_step = 3: must be a function of a step and what it brought$"):
        pretrain(**settings, on_step=3, output=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(UserError, match="no run there"):
        Run(tmp_path)


def test_callbacks_are_told_what_the_files_have(settings, finished, tmp_path):
    steps, evaluations, checkpoints = [], [], []
    run = pretrain(
        **settings,
        output=tmp_path / "run",
        on_step=lambda step, metrics: steps.append({"step": step, **metrics}),
        on_evaluation=lambda step, results: evaluations.append({"step": step, **results}),
        on_checkpoint=lambda step, path: checkpoints.append((step, path)),
    )
    require_equal(run, finished)
    without_epoch = [{name: value for name, value in row.items() if name != "epoch"} for row in run.metrics]
    assert steps == without_epoch and [row["step"] for row in steps] == list(range(1, LAST + 1))
    assert [row["accuracy"] for row in evaluations] == run.evaluations["accuracy"] and evaluations[0]["step"] == 0
    assert checkpoints == list(run.checkpoints.items()) and [step for step, _ in checkpoints] == [3, 6]
    assert run.summary["knn_last"] == evaluations[-1]["accuracy"] and "stopped_by" not in run.summary
    assert run.config.data.batch_size == 32 and run.config.output == run.path


@pytest.mark.parametrize("name", ["on_step", "on_evaluation", "on_checkpoint"])
def test_stop_run_ends_a_run_well_and_it_resumes_bitwise(settings, finished, tmp_path, capsys, name):
    called = []

    def stop(step: int, what: object) -> None:
        called.append(step)
        if step >= 1:
            raise StopRun

    run = pretrain(**{**settings, "checkpoint.every": 0.3}, output=tmp_path / "run", **{name: stop})
    assert "Pretraining stopped" in capsys.readouterr().out
    assert run.summary["stopped_by"] == name and 1 < run.summary["steps"] < LAST
    assert max(run.checkpoints) == run.summary["steps"] <= called[-1] + 2
    assert "stopped by" in repr(run) and run.figures().path.is_file()
    if name == "on_step":
        again = run.resume()
        assert "stopped_by" not in again.summary
        require_equal(again, finished)


def test_an_error_of_a_callback_is_raised_as_it_is_and_leaves_a_run_that_resumes(settings, finished, tmp_path):
    error = ValueError("of the caller")

    def fail(step: int, what: object) -> None:
        if step == 5:
            raise error

    with pytest.raises(ValueError, match="of the caller") as raised:
        pretrain(**settings, output=tmp_path / "run", on_step=fail)
    assert raised.value is error
    run = Run(tmp_path / "run")
    assert list(run.checkpoints) == [3] and run.summary == {}
    require_equal(run.resume(), finished)


def test_ctrl_c_saves_and_raises_and_the_run_resumes_bitwise(settings, finished, tmp_path):
    handlers = [signal.getsignal(number) for number in SIGNALS]

    def interrupt(step: int, metrics: object) -> None:
        if step == 1:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(Preempted, match="saved after step 3; the same command resumes from there") as raised:
        pretrain(**settings, output=tmp_path / "run", on_step=interrupt)
    assert raised.value.run == tmp_path / "run" and raised.value.status == 130
    assert [signal.getsignal(number) for number in SIGNALS] == handlers
    require_equal(Run(raised.value.run).resume(), finished)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_where_nothing_is_to_be_saved_a_signal_raises_at_once(settings, tmp_path, number):
    with pytest.raises(Preempted, match="no step was done yet") as raised:
        pretrain(
            **settings,
            output=tmp_path / "run",
            on_evaluation=lambda step, results: signal.raise_signal(number),
            on_step=lambda step, metrics: pytest.fail("a step was done"),
        )
    assert raised.value.status == (130 if number == signal.SIGINT else 75)


def test_a_second_signal_raises_keyboard_interrupt_at_once(settings, tmp_path, monkeypatch):
    monkeypatch.setattr(preemption, "SAME_SIGNAL_SECONDS", 0.0)

    def insist(step: int, metrics: object) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        pretrain(**settings, output=tmp_path / "run", on_step=insist)
    assert Run(tmp_path / "run").checkpoints == {}


def test_a_run_in_another_thread_and_in_an_event_loop_is_the_same(settings, finished, tmp_path):
    made = []

    async def train() -> None:
        made.append(pretrain(**settings, output=tmp_path / "run"))

    thread = threading.Thread(target=lambda: asyncio.run(train()))
    thread.start()
    thread.join()
    require_equal(made[0], finished)


def test_a_finished_run_is_left_as_it_is(finished):
    before = finished.path.joinpath("summary.json").read_bytes()
    assert finished.resume().path == finished.path
    assert finished.path.joinpath("summary.json").read_bytes() == before


def test_a_run_of_which_little_is_there_can_be_looked_at(tmp_path, finished):
    (tmp_path / "config.yaml").write_text(finished.path.joinpath("config.yaml").read_text())
    run = Run(tmp_path)
    assert len(run.metrics) == len(run.evaluations) == len(run.checkpoints) == len(run.summary) == 0
    assert str(tmp_path) in repr(run) and "<table>" in run._repr_html_()
    with pytest.raises(UserError, match="no checkpoint there"):
        run.encoder()


def test_what_a_run_shows_is_read_anew(finished, tmp_path):
    (tmp_path / "config.yaml").write_text(finished.path.joinpath("config.yaml").read_text())
    run = Run(str(tmp_path))
    assert len(run.metrics) == 0
    line = {"event": "train", "step": 1, "epoch": 0.5, "loss": 0.25}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    assert run.metrics["loss"] == [0.25] and Path(run) == tmp_path
