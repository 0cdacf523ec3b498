"""Reading ahead by threads: order, what fails, what does not answer, and the end of it."""

import os
import re
import shutil
import threading

import numpy as np
import pytest
import torch

from unigrad_fast.pipelines import DataError, Loader, Manifest
from unigrad_fast.pipelines.reading.attempts import Reading, Turn
from unigrad_fast.pipelines.reading.damage import Damaged
from unigrad_fast.pipelines.reading.replacement import BLANK, substitute
from unigrad_fast.pipelines.reading.source import THREADS, Source
from unigrad_fast.pipelines.storage import Storage

COUNT = 40


class Files:
    """In place of a manifest: every image is its number, and reading some of them does something else."""

    def __init__(self, **odd):
        self.sizes, self.storage = np.ones((COUNT, 2), np.int32), Storage()
        self.odd = {int(name.removeprefix("image")): act for name, act in odd.items()}
        self.asked = []

    def __len__(self):
        return COUNT

    def path(self, image):
        return f"/files/{image}"

    def state(self, image):
        return 1, 1

    def read(self, image):
        self.asked.append(image)
        if image in self.odd:
            self.odd[image]()
        return bytes([image])


@pytest.fixture
def reader():
    """Makes sources of batches of 4 images in their order, and waits for the end of their threads."""
    before, sources = set(threading.enumerate()), []

    def make(files, size=4, last=None, ahead=1, timeout=60.0, seed=3, known=None, **options):
        steps = []

        def indices(step):
            steps.append(step)
            return 2, np.arange(step * size, step * size + size) % COUNT

        options.setdefault("damaged", Damaged(files))
        source = Source(
            files, indices, last=last, ahead=ahead, timeout=timeout, seed=seed, known=known or {}, **options
        )
        source.steps = steps
        sources.append(source)
        return source

    yield make
    for source in sources:
        source.close()
    ended(before)


def ended(before):
    """Waits for all threads that were not there before."""
    for thread in set(threading.enumerate()) - before:
        thread.join(20)
        assert not thread.is_alive()


def fail(error):
    def act():
        raise error

    return act


def test_step_has_its_images_in_their_order(reader):
    supply = reader(Files()).take(5)
    assert supply.step == 5 and supply.epoch == 2
    assert supply.asked.tolist() == supply.index.tolist() == [20, 21, 22, 23] and supply.index.dtype == np.int64
    assert [data.tolist() for data in supply.data] == [[20], [21], [22], [23]]
    assert not supply.replaced.any() and supply.failures == []


def test_steps_are_read_ahead_and_none_after_the_last(reader):
    source = reader(Files(), ahead=2, last=4)
    source.take(0)
    assert source.steps == [0, 1, 2]
    source.take(1)
    assert source.steps == [0, 1, 2, 3]
    assert source.take(2).step == 2 and source.take(3).step == 3 and source.steps == [0, 1, 2, 3]
    assert source.take(4) is None and source.take(5) is None


def test_step_can_be_taken_again(reader):
    source = reader(Files())
    first, again = source.take(0), source.take(0)
    assert first.index.tolist() == again.index.tolist()
    assert source.take(7).index.tolist() == [28, 29, 30, 31]


def test_failure_is_told_with_path_and_reason(reader):
    supply = reader(Files(image6=fail(PermissionError(13, "Permission denied")))).take(1)
    instead = substitute(3, 2, 6, 1, COUNT)
    assert supply.index.tolist() == [4, 5, instead, 7] and supply.replaced.tolist() == [False, False, True, False]
    assert supply.data[2].tolist() == [instead]
    (failure,) = supply.failures
    assert (failure.step, failure.image, failure.path) == (1, 6, "/files/6") and "permission denied" in failure.reason


def test_without_a_seed_nothing_takes_the_place(reader):
    supply = reader(Files(image6=fail(OSError(5, "Input/output error"))), seed=None).take(1)
    assert supply.index.tolist() == [4, 5, -1, 7] and supply.data[2] is BLANK
    assert [failure.image for failure in supply.failures] == [6]


def test_image_known_to_be_bad_is_not_read(reader):
    files = Files()
    damaged = Damaged(files)
    damaged.add(5, "it was bad")
    files.sizes[6] = 0
    source = reader(files, damaged=damaged, known={(1, 7): "it was slow", (2, 4): "in another step"})
    supply = source.take(1)
    reasons = {failure.image: failure.reason for failure in supply.failures}
    assert reasons == {5: "it was bad", 6: "its header cannot be read", 7: "it was slow"}
    assert not {5, 6, 7} & set(files.asked)


def test_mistake_in_the_program_is_raised_where_the_step_is_taken(reader):
    source = reader(Files(image9=fail(ZeroDivisionError("a mistake"))))
    source.take(0)
    source.take(1)
    with pytest.raises(ZeroDivisionError, match="a mistake"):
        source.take(2)


def test_late_answer_changes_nothing(reader):
    answer = threading.Event()
    files = Files(image6=answer.wait)
    before = set(threading.enumerate())
    source = reader(files, timeout=0.5)
    supply = source.take(1)
    instead = substitute(3, 2, 6, 1, COUNT)
    assert supply.index.tolist() == [4, 5, instead, 7]
    (failure,) = supply.failures
    assert failure.image == 6 and failure.reason == "it could not be read within 0.5 s"
    answer.set()
    source.close()
    ended(before)
    assert supply.index.tolist() == [4, 5, instead, 7] and len(supply.failures) == 1


def test_result_of_a_turn_that_was_given_up_does_not_count(reader):
    step = Reading(0, 0, np.arange(2))
    source = reader(Files())
    late, other = (Turn(source.candidates, step, place) for place in (0, 1))
    instead = Turn(source.candidates, step, 0, 1)
    step.set(late, "late")
    assert step.results == [None, None]
    step.set(other, "other")
    step.set(instead, "instead")
    step.set(late, "later")
    assert step.results == ["instead", "other"]
    assert step.wait(60.0, source._threads, source.stopped) == []


def test_late_failure_is_not_told_and_starts_no_search(reader):
    answer = threading.Event()

    def act():
        answer.wait()
        raise OSError(5, "Input/output error")

    files = Files(image6=act)
    before = set(threading.enumerate())
    source = reader(files, timeout=0.5, ahead=0)
    supply = source.take(1)
    asked = sorted(files.asked)
    answer.set()
    source.close()
    ended(before)
    assert len(supply.failures) == 1 and sorted(files.asked) == asked


def test_all_threads_that_wait_are_replaced(reader):
    answer = threading.Event()
    stalled = range(2 * THREADS)
    files = Files(**{f"image{image}": answer.wait for image in stalled})
    supply = reader(files, size=20, timeout=0.5).take(0)
    assert supply.replaced[: len(stalled)].all() and not supply.replaced[len(stalled) :].any()
    assert not set(supply.index.tolist()) & set(stalled)
    answer.set()


def test_when_nothing_answers_it_ends_after_three_tries(reader):
    answer = threading.Event()
    source = reader(Files(**{f"image{image}": answer.wait for image in range(COUNT)}), size=1, timeout=0.02, ahead=0)
    with pytest.raises(DataError, match=r"/files/0: neither it nor 2 substitutes could be read within 0\.02 s"):
        source.take(0)
    answer.set()


def test_an_image_that_has_no_substitute_gives_way_to_another_of_its_batch_where_that_is_wanted(reader):
    answer = threading.Event()
    silent = [6, *(substitute(3, 2, 6, attempt, COUNT) for attempt in (1, 2))]
    files = Files(**{f"image{image}": answer.wait for image in silent})
    source = reader(files, timeout=0.5, ahead=0, outlasts=True)
    assert not set(silent) & {4, 5, 7, 8, 9, 10, 11} - {6}
    supply = source.take(1)
    assert supply.index.tolist()[:2] + supply.index.tolist()[3:] == [4, 5, 7] and supply.index[2] in (4, 5, 7)
    assert supply.data[2].tolist() == [supply.index[2]] and supply.replaced.tolist() == [False, False, True, False]
    assert {failure.image for failure in supply.failures} == set(silent)
    assert re.match(r"/files/6: neither it nor 2 substitutes could be read within 0\.5 s.*storage", supply.lost)
    later = source.take(2)
    assert later.index.tolist() == [8, 9, 10, 11] and later.lost == supply.lost
    answer.set()


def test_a_batch_of_which_nothing_can_be_read_repeats_an_earlier_image_and_the_first_one_is_an_error(reader):
    answer, lost = threading.Event(), threading.Event()
    files = Files(**{f"image{image}": lambda: lost.is_set() and answer.wait() for image in range(COUNT)})
    source = reader(files, timeout=0.05, ahead=0, outlasts=True, size=2 * THREADS)
    assert not source.take(0).replaced.any()
    lost.set()
    supply = source.take(1)
    assert set(supply.index.tolist()) == {0} and supply.lost
    first = reader(files, timeout=0.05, ahead=0, outlasts=True)
    with pytest.raises(DataError, match="check the storage"):
        first.take(0)
    answer.set()


def test_failures_that_are_no_silence_are_outlasted_too(reader):
    def refuse():
        raise OSError(5, "Input/output error")

    files = Files(**{f"image{image}": refuse for image in range(4, COUNT)})
    source = reader(files, ahead=0, outlasts=True)
    source.take(0)
    supply = source.take(1)
    assert set(supply.index.tolist()) <= {0, 1, 2, 3} and supply.replaced.all()


def test_waiting_ends_when_nobody_waits_any_more(reader):
    answer, stopped = threading.Event(), threading.Event()

    def act():
        stopped.set()
        answer.wait()

    source = reader(Files(image2=act), stopped=stopped.is_set)
    with pytest.raises(InterruptedError):
        source.take(0)
    answer.set()


def test_closing_drops_what_was_to_be_read(reader):
    entered, answer = threading.Semaphore(0), threading.Event()

    def act():
        entered.release()
        answer.wait()

    files = Files(**{f"image{image}": act for image in range(COUNT)})
    before = set(threading.enumerate())
    source = reader(files, size=20, ahead=1)
    taking = threading.Thread(target=source._begin, args=(0,))
    taking.start()
    taking.join()
    for _ in range(THREADS):
        entered.acquire()
    source.close()
    answer.set()
    ended(before)
    assert len(files.asked) == THREADS


def test_an_image_that_did_not_answer_is_not_waited_for_again(tree, tmp_path):
    manifest = Manifest.open(shutil.copytree(tree, tmp_path / "tree"))
    loader = Loader(manifest, batch_size=12, image_size=32, threads=1, timeout=0.5)
    image = int(loader.indices(2)[1][3])
    os.remove(manifest.path(image))
    os.mkfifo(manifest.path(image))
    asked = []
    read = manifest.read
    object.__setattr__(manifest, "read", lambda i: asked.append(i) or read(i))
    batches = list(loader.iterate(0, 3 * loader.steps_per_epoch))
    replaced = [failure.step for batch in batches for failure in batch.failures]
    assert len(replaced) >= 2 and asked.count(image) == 1
    assert {failure.image for batch in batches for failure in batch.failures} == {image}

    again = Loader(
        manifest,
        batch_size=12,
        image_size=32,
        threads=1,
        known={(replaced[0], image): "it could not be read within 1 s"},
    )
    asked.clear()
    for one, other in zip(batches, again.iterate(0, len(batches)), strict=True):
        assert torch.equal(one.index, other.index)
    assert image not in asked
