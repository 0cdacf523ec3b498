"""Work in the background: what arrives, how it ends, and what is left of it."""

import gc
import os
import shutil
import subprocess
import sys
import threading

import pytest
import torch

from unigrad_fast.pipelines import Loader
from unigrad_fast.pipelines.background import in_background
from unigrad_fast.pipelines.cpu_views import one_thread_each


def counting(log, stop=None):
    """Work that gives numbers, and notes what it makes and its end."""

    def work(stopped):
        try:
            number = 0
            while number != stop:
                log.append(number)
                yield number
                number += 1
        finally:
            log.append("closed")

    return work


def working():
    return [thread for thread in threading.enumerate() if thread.name.startswith(("views", "augmentation"))]


@pytest.fixture(scope="module", autouse=True)
def quick_collections():
    """What was there before is not looked at again."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def nothing_left():
    before = threading.enumerate()
    yield
    gc.collect()
    assert working() == []
    for thread in threading.enumerate():
        if thread.name == "image reader" and thread not in before:
            thread.join(20)
            assert not thread.is_alive()


@pytest.mark.parametrize("ahead", [1, 3])
def test_all_arrives_in_its_order(ahead):
    log = []
    assert list(in_background(counting(log, 20), ahead)) == list(range(20))
    assert log == [*range(20), "closed"]
    assert list(in_background(counting([], 0), ahead)) == []


def test_nothing_begins_before_the_first_is_asked_for():
    log = []
    items = in_background(counting(log), 1)
    assert not working()
    items.close()
    assert log == []


@pytest.mark.parametrize("ahead", [1, 3])
def test_only_so_much_is_made_ahead(ahead):
    log = []
    items = in_background(counting(log), ahead)
    assert next(items) == 0
    items.close()
    assert log.pop() == "closed" and len(log) <= ahead + 3  # one handed over, one in the hand, one made while it ends


def test_failure_arrives_after_what_was_made_before_it():
    def work(stopped):
        yield 1
        yield 2
        raise KeyError("broken")

    items = in_background(work, 4)
    assert [next(items), next(items)] == [1, 2]
    with pytest.raises(KeyError, match="broken"):
        next(items)
    assert list(items) == []


def test_failure_before_there_is_a_generator_arrives():
    def work(stopped):
        raise KeyError("broken")

    with pytest.raises(KeyError, match="broken"):
        next(in_background(work, 1))


def test_failure_while_closing_arrives():
    def work(stopped):
        try:
            yield 1
        finally:
            raise KeyError("broken")

    with pytest.raises(KeyError, match="broken"):
        list(in_background(work, 1))


def test_closing_ends_work_that_waits_for_room():
    log, full = [], threading.Event()

    def work(stopped):
        for number in counting(log)(stopped):
            if number == 2:  # one taken, one in the queue: this one waits
                full.set()
            yield number

    items = in_background(work, 1)
    next(items)
    full.wait()
    items.close()
    gc.collect()
    assert log[-1] == "closed" and not working()


def test_closing_waits_for_work_that_is_under_way():
    log, entered, proceed = [], threading.Event(), threading.Event()

    def work(stopped):
        yield 1
        entered.set()
        proceed.wait()
        log.append("done")
        assert stopped()
        yield 2
        log.append("more")

    items = in_background(work, 1)
    next(items)
    entered.wait()
    closing = threading.Thread(target=items.close)
    closing.start()
    assert closing.is_alive() and log == []
    while not items.gi_running:  # until it is inside
        pass
    threading.Timer(0.05, proceed.set).start()
    closing.join()
    assert log == ["done"] and not working()


def test_generator_collected_in_its_own_thread_is_closed_without_a_complaint(monkeypatch):
    complaints, go = [], threading.Event()
    monkeypatch.setattr(sys, "unraisablehook", complaints.append)
    log, held = [], []

    def work(stopped):
        yield 1
        yield 2  # nobody takes it
        go.wait()
        held.clear()
        log.append(stopped())
        yield 3
        log.append("more")

    held.append(in_background(work, 1))
    next(held[0])
    (thread,) = working()
    go.set()
    thread.join(20)
    assert not thread.is_alive() and log == [True] and complaints == []


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def in_a_new_thread(function):
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


def test_threads_compute_with_one_core_and_others_with_what_they_had(three_threads):
    with one_thread_each(2) as pool:
        assert {pool.submit(torch.get_num_threads).result() for _ in range(8)} == {1}
        assert torch.get_num_threads() == in_a_new_thread(torch.get_num_threads) == 3
    assert torch.get_num_threads() == in_a_new_thread(torch.get_num_threads) == 3


def test_threads_begun_from_many_sides_leave_the_number_as_it_was(three_threads):
    def begin():
        for _ in range(20):
            with one_thread_each(2):
                pass

    sides = [threading.Thread(target=begin) for _ in range(4)]
    for side in sides:
        side.start()
    for side in sides:
        side.join()
    assert torch.get_num_threads() == in_a_new_thread(torch.get_num_threads) == 3


def loading(manifest, **options):
    return Loader(manifest, batch_size=6, image_size=16, threads=2, **options)


def test_iterating_leaves_the_number_of_threads_as_it_was(manifest, three_threads):
    def both():
        return torch.get_num_threads(), in_a_new_thread(torch.get_num_threads)

    stream = loading(manifest).iterate(0, 3)
    for _ in stream:
        assert both() == (3, 3)
    assert both() == (3, 3)


@pytest.mark.parametrize("end", ["exhausted", "closed", "loader closed", "dropped", "dropped in a cycle"])
def test_no_thread_is_left(manifest, end):
    batches = loading(manifest)
    stream = batches.iterate(0, 3 if end == "exhausted" else None)
    next(stream)
    assert len(working()) == 3
    if end == "exhausted":
        list(stream)
    elif end == "closed":
        stream.close()
    elif end == "loader closed":
        batches.close()
    elif end == "dropped in a cycle":
        cycle = [stream]
        cycle.append(cycle)
        del cycle
    del stream
    gc.collect()
    assert working() == []


def test_iterations_take_turns(manifest):
    whole, other = list(loading(manifest).iterate(0, 4)), list(loading(manifest, seed=1).iterate(0, 4))
    one, two = loading(manifest).iterate(), loading(manifest, seed=1).iterate()
    for left, right in zip(whole, other, strict=True):
        for batch, same in ((next(one), left), (next(two), right)):
            assert all(torch.equal(a, b) for a, b in zip(batch.views, same.views, strict=True))
    one.close()
    assert next(two).step == 4
    two.close()


def test_two_iterations_of_a_loader_take_turns(manifest):
    batches = loading(manifest)
    one, two = batches.iterate(0, 3), batches.iterate(0, 3)
    for left, right in zip(one, two, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(left.views, right.views, strict=True))
        assert not {view.data_ptr() for view in left.views} & {view.data_ptr() for view in right.views}


def resident():
    """Megabytes of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.long
def test_memory_does_not_grow(manifest):
    def iterate(times):
        for _ in range(times):
            stream = loading(manifest).iterate()
            next(stream)
            stream.close()
        for _ in loading(manifest).iterate(0, 4 * times):
            pass
        gc.collect()
        return resident()

    iterate(10)
    before = iterate(5)
    assert iterate(30) - before < 15


SCRIPT = """
import os, sys
from unigrad_fast.pipelines import EvaluationLoader, Loader, Manifest
manifest = Manifest.from_folder(sys.argv[1])
how = sys.argv[2]
loader = Loader(manifest, batch_size=6, image_size=16, threads=2, timeout=1e6, prefetch=1)
if how == "waiting":
    path = manifest.path(int(loader.indices(1)[1][0]))
    os.unlink(path)
    os.mkfifo(path)
stream = loader.iterate()
cycle = [stream]
cycle.append(cycle)
next(stream)
if how == "several":  # in a process that exits on its own
    others = [Loader(manifest, batch_size=6, image_size=16, seed=seed).iterate() for seed in range(3)]
    for other in others:
        next(other)
    more = iter(EvaluationLoader(manifest, 16, batch_size=6))
    cycle.append(more)
    next(more)
    sys.exit(7)
print("end")
"""


@pytest.mark.parametrize("how", ["several", "waiting"])
def test_interpreter_ends_with_an_open_iteration(how, tree, tmp_path):
    shutil.copytree(tree, tmp_path / "tree")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "tree"), how],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([p for p in sys.path if p])},
    )
    assert done.stderr == ""
    assert (done.returncode, done.stdout) == ((7, "") if how == "several" else (0, "end\n"))
