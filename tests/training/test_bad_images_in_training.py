"""A run of two ranks outlives images that go bad under it, lists them, and stops when they are too many."""

from __future__ import annotations

import json
import os
import threading
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist
from bad_files import BAD
from drawn_images import draw_tree
from interrupted_run import RECIPE, Run, losses, steps_logged
from trainer_state import batches, changed, make_trainer, small_config, state

from unigrad_fast.checkpoints.files import Reader, latest
from unigrad_fast.pipelines import Failure, Manifest
from unigrad_fast.pipelines.reading.supply import allowed
from unigrad_fast.runtime.errors import RunStopped
from unigrad_fast.runtime.preemption import Preemption
from unigrad_fast.training import checkpoint, loop
from unigrad_fast.training.bad_images import MOST_TOLD, BadImages
from unigrad_fast.training.telemetry import Telemetry

EPOCHS, STEPS_PER_EPOCH = 5, 3
KINDS = {**BAD, "removed": os.remove, "stalled": lambda path: (os.remove(path), os.mkfifo(path))}


@pytest.fixture
def data(tmp_path) -> Path:
    """A folder of its own, for its images are spoiled."""
    draw_tree(tmp_path / "train", per_class=48)
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(batch=32, epochs=EPOCHS))
    return tmp_path


def images_of(data: Path) -> list[Path]:
    return sorted((data / "train").glob("*/*.jpg"))


def rows(output: Path) -> list[dict]:
    return [json.loads(line) for line in (output / "bad_images.jsonl").read_text().splitlines()]


def listed(output: Path) -> dict[str, str]:
    lines = rows(output)
    assert len({(line["step"], line["image"]) for line in lines}) == len(lines)
    return {line["path"]: line["reason"] for line in lines}


@pytest.mark.timeout(600)
def test_every_kind_of_bad_file_planted_in_a_running_job_is_replaced_and_listed(data, tmp_path):
    output = tmp_path / "run"
    given = ("--data.max_bad_fraction", "0.2", "--data.read_timeout", "3", "--data.read_ahead", "0")
    run = Run(data, output, 2, *given)
    assert run.wait_for(lambda: steps_logged(output) > 0)
    planted = dict(zip(KINDS, images_of(data)[::7], strict=False))
    assert planted.keys() == KINDS.keys()
    for kind, path in planted.items():
        KINDS[kind](path)
    statuses, said = run.end()
    assert statuses == [0, 0], said
    assert len(losses(output)) == EPOCHS * STEPS_PER_EPOCH
    reasons = listed(output)
    assert reasons.keys() == {str(path) for path in planted.values()}
    assert "within 3 s" in reasons[str(planted["stalled"])]
    assert json.loads((output / "summary.json").read_text())["bad_images"] == len(KINDS)
    steps = [row["step"] for row in rows(output) if row["path"] == str(planted["stalled"])]
    assert len(steps) >= 2, "in later epochs too"
    for path, reason in reasons.items():
        assert f"{path}: {reason}" in (output / "log.txt").read_text()


@pytest.mark.timeout(600)
def test_a_job_with_too_many_bad_files_stops_on_all_ranks_with_the_list(data, tmp_path):
    output = tmp_path / "run"
    run = Run(data, output, 2, "--data.max_bad_fraction", "0.03", "--data.read_ahead", "0")
    assert run.wait_for(lambda: steps_logged(output) > 0)
    spoiled = images_of(data)[::8]
    for path in spoiled:
        BAD["truncated"](path)
    statuses, said = run.end()
    assert statuses == [3, 3], said
    assert "more than data.max_bad_fraction = 0.03 allows" in said
    assert listed(output).keys() <= {str(path) for path in spoiled}
    assert latest(output) is not None, "what was learnt is saved"
    assert "allows" in (output / "stopped.txt").read_text()


@pytest.mark.parametrize(
    ("images", "share", "most"),
    [(2, 0.01, 0), (10, 0.01, 1), (50, 0.01, 5), (400, 0.01, 5), (2000, 0.01, 20), (50, 0.5, 25), (50, 0, 0)],
)
def test_a_few_images_of_a_small_set_may_be_bad(images, share, most):
    assert int(allowed(images, share)) == most


def test_a_folder_with_too_many_bad_files_is_refused_before_any_work(data, tmp_path):
    for path in images_of(data)[::8]:
        BAD["garbage"](path)
    statuses, said = Run(data, tmp_path / "run").end()
    assert statuses == [2], said
    assert "12 of 96 images" in said and str(images_of(data)[0]) in said
    assert "`unigrad-fast data scan` lists all of them; repair or remove them, or go on without them with" in said
    assert "--data.max_bad_fraction 0.13" in said
    assert not (tmp_path / "run").exists()


def steps_with_a_stalled_file(settings, path: str) -> dict:
    """Differences between a run in which a file stalls once, and its repetition when it is well again."""
    whole = make_trainer(settings)
    checkpoint.save(whole, {})
    content = Path(path).read_bytes()
    os.remove(path)
    os.mkfifo(path)
    for step in range(3):
        whole.step(step, batches(whole, step))
    told = whole.bad_images.exchange()
    assert len(told) == 1 and path in told[0]
    os.remove(path)
    Path(path).write_bytes(content)
    repeated = make_trainer(settings)
    checkpoint.restore(repeated, Reader(latest(settings.output)))
    for step in range(3):
        repeated.step(step, batches(repeated, step))
    assert repeated.bad_images.exchange() == told
    return changed(state(whole), state(repeated))


def test_a_step_that_is_repeated_replaces_what_it_replaced_before(data, workers, tmp_path):
    further = {"data__read_timeout": 1.0, "data__max_bad_fraction": 0.1}
    settings = small_config(str(data / "train"), **further).model_copy(update={"output": tmp_path / "run"})
    (settings.output).mkdir()
    assert workers(1).run(steps_with_a_stalled_file, settings, str(images_of(data)[20])) == [{}]


def run_whose_storage_is_lost_to_rank_one(settings) -> tuple[str, int, int]:
    """What a run ends with, its step then, and that of the newest checkpoint."""
    trainer, rank = make_trainer(settings), dist.get_rank()
    read, answer = Manifest.read, threading.Event()

    def read_or_wait(manifest: Manifest, image: int) -> bytes:
        if rank == 1 and trainer.steps_done >= 2:
            answer.wait()
        return read(manifest, image)

    lengths = trainer.total_steps, trainer.steps_per_epoch
    try:
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(Manifest, "read", read_or_wait))
            telemetry = stack.enter_context(Telemetry(settings.output, settings, *lengths, rank, 0, None))
            preemption = stack.enter_context(Preemption())
            loop.run(trainer, telemetry, None, preemption)
    except RunStopped as error:
        return str(error), trainer.steps_done, Reader(latest(settings.output)).about["step"]
    finally:
        answer.set()
    return "", trainer.steps_done, -1


def test_a_rank_that_can_read_no_more_has_all_stop_together_after_a_checkpoint(data, workers, tmp_path):
    further = {"data__read_timeout": 0.3, "data__max_bad_fraction": 1.0, "engine__accumulation_steps": 2}
    further["data__read_ahead"] = 0  # else all is read before the storage is lost
    settings = small_config(str(data / "train"), **further).model_copy(update={"output": tmp_path / "run"})
    settings.output.mkdir()
    (first, second) = workers(2).run(run_whose_storage_is_lost_to_rank_one, settings)
    assert first == second
    said, step, saved = first
    assert "check the storage. Saved after step" in said and said.endswith(
        f"{step}; the same command resumes from there"
    )
    assert saved == step and 2 <= step < 12


def stopped_and_continued(settings) -> dict:
    """Differences of a run of six steps, an epoch and its repetition, to one that is stopped after two."""
    whole = make_trainer(settings)
    for step in range(6):
        if step == 2:
            checkpoint.save(whole, {})
        whole.step(step, batches(whole, step))
    assert len(whole.bad_images.exchange()) == 1, "the other one was told of at the start"
    assert whole.bad_images.total == 2
    continued = make_trainer(settings)
    checkpoint.restore(continued, Reader(latest(settings.output)))
    for step in range(2, 6):
        continued.step(step, batches(continued, step))
    return changed(state(whole), state(continued))


def test_a_run_with_bad_files_goes_on_bit_for_bit(data, workers, tmp_path):
    BAD["truncated"](images_of(data)[10])
    BAD["garbage"](images_of(data)[30])
    settings = small_config(str(data / "train"), data__max_bad_fraction=0.1)
    settings = settings.model_copy(update={"output": tmp_path / "run"})
    settings.output.mkdir()
    assert workers(1).run(stopped_and_continued, settings) == [{}]


def book_keeping(images: str, folder: Path) -> tuple[list[int], int, list[int], int, bytes]:
    manifest = Manifest.open(images)

    def found(step, *images):
        return [Failure(step, image, manifest.path(image), "broken") for image in images]

    first = BadImages(folder, manifest, 1.0)
    first.note(found(0, 5, 7))
    first.note(found(1, 9))
    told = [len(first.exchange())]
    first.note(found(3, 5))
    told.append(len(first.exchange()))
    with open(first.path, "ab") as file:
        file.write(b'{"step": 4, "ima')
    second = BadImages(folder, manifest, 0.02)  # three are more
    counts = [len(second.images)]
    second.note(found(3, 5))
    told.append(len(second.exchange()))
    counts.append(len(second.images))
    second.note(found(4, *range(90)))
    told.append(len(second.exchange()))
    second.note(found(5, 91))
    told.append(len(second.exchange()))
    return told, second.total, counts, len(BadImages(folder, manifest, 1.0).known), first.path.read_bytes()


def test_the_list_survives_a_kill_tells_each_image_once_and_counts_what_is_bad_now(images, workers, tmp_path):
    told, total, counts, known, content = workers(1).run(book_keeping, str(images), tmp_path)[0]
    assert told == [3, 0, 1, MOST_TOLD, 0]
    assert counts == [0, 1], "what was mended since does not count"
    assert total == 91
    assert known == 4 + 90 + 1
    assert content.count(b'\n{"step": 4, "ima\n') == 1 and content.endswith(b"}\n")


def damaged_lists(images: str, folder: Path) -> list[int]:
    manifest = Manifest.open(images)
    good = b'{"step": 1, "image": 2, "path": "p", "reason": "r"}\n'
    counts = []
    for line in (
        b"\xff\xfe\n",
        b'{"step": [1], "image": 2, "path": "p", "reason": "r"}\n',
        b'{"step": 1, "image": 100000, "path": "p", "reason": "r"}\n',
        b'{"step": 1, "image": "x", "path": "p", "reason": "r"}\n',
        b'{"step": 1}\n[]\n7\n\n',
    ):
        (folder / "bad_images.jsonl").write_bytes(line + good)
        counts.append(len(BadImages(folder, manifest, 0.5).known))
    return counts


def test_damaged_lines_of_the_list_are_left_out(images, workers, tmp_path):
    assert workers(1).run(damaged_lists, str(images), tmp_path) == [[1] * 5]
