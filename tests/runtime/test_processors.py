"""Compute threads fit the free cores; too many are noticed, with the number that would fit."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from forked import start

from unigrad_fast.pipelines.cores import quota
from unigrad_fast.runtime import process_group, processors
from unigrad_fast.runtime.processors import (
    CHOSEN_BY,
    FREE_LOOKS,
    ComputeThreads,
    Use,
    Watch,
    capacity,
    compute_threads,
    crowded,
)

CPU = torch.device("cpu")


def use(threads: int, cores: int = 8, own: float = 0.0, busy: float | None = 0.0, **more) -> Use:
    place = more.get("place", "node"), tuple(range(more.get("first", 0), more.get("first", 0) + cores))
    return Use(place, more.get("quota"), threads, own, busy, more.get("group"))


@pytest.mark.parametrize(
    ("uses", "said"),
    [
        ([use(8)], None),
        ([use(8, busy=8.0, own=8.0)], None),  # it is busy itself
        ([use(1, cores=1, busy=1.0)], None),  # one thread cannot be fewer
        ([use(2, cores=2, busy=None)], None),
        ([use(2, cores=2, busy=1.1)], "stop those programs, or set THREADS=1"),
        ([use(8, busy=3.0, own=1.0)], "THREADS=6"),
        ([use(8), use(8, place="another")], None),
        ([use(8), use(8)], "8 cores can be used by 2 ranks; with 16 threads of 2 ranks this run may be"),
        ([use(8), use(8)], "slower; set THREADS=4"),
        ([use(1, cores=2)] * 3, "start fewer ranks"),
        ([use(8, quota=2.5)], "the time of 2.5 cores; with 8 threads this run may be many times slower; set THREADS=2"),
        ([use(1, quota=0.5)], None),
        ([use(2, quota=1.5)], None),
        ([use(4, busy=4.0, own=1.0), use(4, busy=4.0, own=1.0)], "use about 2.0 of 8 cores"),
        ([use(4, busy=2.0, own=1.0), use(4, busy=2.0, own=1.0)], None),  # the other rank
    ],
)
def test_threads_that_wait_for_each_other_are_told_what_would_fit(uses, said):
    found = crowded(uses, "set THREADS={}".format)
    assert found is None if said is None else said in found, found


@pytest.mark.parametrize(
    ("uses", "threads", "why"),
    [
        ([use(8)], 8, "8 cores can be used"),
        ([use(8, busy=0.4)], 8, "8 cores"),
        ([use(2, cores=2, busy=2.0, own=1.0)], 1, "other programs use about 1.0 of 2 cores"),
        ([use(2, cores=2, busy=2.0)], 0, "about 2.0 of 2 cores"),
        ([use(2, cores=2, quota=1.5)], 1, "a control group allows the time of 1.5 cores"),
        ([use(8, cores=64, busy=40.0, quota=4.0)], 4, "the time of 4 cores"),  # others do not use this quota
        ([use(8, cores=64, quota=4.0, own=1.0, group=3.0)], 2, "of which other programs use about 2.0"),
        ([use(8, own=1.0)] * 4, 2, "8 cores can be used by 4 ranks"),
        ([use(2, cores=2, first=2 * rank, quota=6.0) for rank in range(4)], 1, "the time of 6 cores by 4 ranks"),
        ([use(2, cores=2, first=2 * rank) for rank in range(4)], 2, "2 cores can be used"),  # bound to their cores
    ],
)
def test_there_is_room_for_as_many_threads_as_cores_are_left(uses, threads, why):
    found = capacity(uses[0], uses)
    assert found.threads == threads and why in found.why, found


def compute(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def test_what_others_keep_busy_is_seen_and_own_work_is_not_taken_for_it():
    own_core = {min(os.sched_getaffinity(0))}
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, own_core)
    try:
        watch = Watch()
        other = start(compute, 1.0)
        other.join()
        found = watch.use()
    finally:
        os.sched_setaffinity(0, before)
    assert found.place[1] == tuple(own_core)
    assert found.busy is None or found.busy > found.own >= 0


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[contextmanager]:
    """`machine(use, ...)` is what this rank and others see; torch has 4 threads there, and nobody chose them."""
    for name in CHOSEN_BY:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(processors, "crowded", crowded)
    monkeypatch.setattr(processors, "LEAST_SECONDS", 0.0)
    before = torch.get_num_threads()

    def take(*uses: Use) -> None:
        own, *others = uses
        monkeypatch.setattr(Watch, "use", lambda self: replace(own, threads=torch.get_num_threads()))
        monkeypatch.setattr(process_group, "gather", lambda mine: [mine, *others])

    torch.set_num_threads(4)
    yield take
    torch.set_num_threads(before)


IDLE, BESIDE = use(4, cores=4, own=1.0, busy=1.1), use(4, cores=4, own=1.0, busy=2.0)


def test_a_new_run_takes_the_free_cores_and_says_so_once(machine):
    machine(IDLE)
    with compute_threads(CPU, key="engine.threads") as threads:
        assert torch.get_num_threads() == 4
        assert threads.said == "computing with 4 threads: 4 cores can be used; set engine.threads to change it"
    machine(BESIDE)
    with compute_threads(CPU) as threads:
        assert torch.get_num_threads() == 3 and threads.warning is None
        why = "other programs use about 1.0 of 4 cores"
        assert threads.said == f"computing with 3 threads: {why}; set OMP_NUM_THREADS to change it"
    assert torch.get_num_threads() == 4  # a notebook goes on as before


def test_ranks_take_equal_shares_also_of_different_machines(machine):
    machine(use(4), use(4), use(4, cores=4, place="b", busy=2.0), use(4, cores=4, place="b", busy=2.0))
    with compute_threads(CPU):
        assert torch.get_num_threads() == 1


@pytest.mark.parametrize("name", CHOSEN_BY)
def test_what_a_user_set_stays(machine, monkeypatch, name):
    machine(BESIDE)
    monkeypatch.setenv(name, "4")
    with compute_threads(CPU) as threads:
        assert torch.get_num_threads() == 4 and threads.said is None
        assert "set OMP_NUM_THREADS=3" in threads.warning
    with compute_threads(CPU, asked=2, key="engine.threads") as threads:  # a launcher sets the variable too
        assert torch.get_num_threads() == 2 and threads.said.startswith("computing with 2 threads, as engine.threads")
    monkeypatch.setenv(name, "")  # is not set
    with compute_threads(CPU):
        assert torch.get_num_threads() == 3


def test_a_resumed_run_keeps_its_number_and_says_what_has_changed(machine, monkeypatch):
    def told(**settings) -> tuple[int, str | None, str | None]:
        with compute_threads(CPU, key="engine.threads", **settings) as threads:
            return torch.get_num_threads(), threads.said, threads.warning

    machine(IDLE)
    number, said, warning = told(kept=2)
    assert (number, warning) == (2, None)
    assert said.startswith("computing with 2 threads, as this run began; 4 cores can be used: engine.threads 4 may be")
    assert told(kept=4) == (4, "computing with 4 threads, as this run began", None)
    machine(BESIDE)
    number, said, warning = told(kept=4)
    assert (number, said) == (4, "computing with 4 threads, as this run began")
    assert "about 1.0 of 4 cores" in warning and warning.endswith("stop those programs, or set engine.threads 3")
    number, said, _ = told(kept=4, asked=3)
    assert number == 3 and "this run began with 4, so its numbers change by rounding" in said
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert told(kept=3)[:2] == (4, "computing with 4 threads; this run began with 3, so its numbers change by rounding")


def test_on_a_gpu_ranks_share_the_cores_and_nothing_is_said(machine):
    machine(use(4, cores=4, busy=4.0), use(4, cores=4, busy=None))
    with compute_threads(torch.device("cuda"), kept=4) as threads:
        assert torch.get_num_threads() == 2 and threads.said is threads.warning is None


def test_a_neighbour_that_comes_later_is_told_once(machine, monkeypatch):
    machine(IDLE)
    torch.set_num_threads(2)
    with compute_threads(CPU) as threads:
        machine(use(2, cores=2, own=1.0, busy=2.0))
        assert threads.newly_crowded("continue with {}".format) is None  # too early to say
        monkeypatch.setattr(processors, "LATER_SECONDS", 0.0)
        assert threads.newly_crowded("continue with {}".format) is None  # a moment, or this process was suspended
        found = threads.newly_crowded("continue with {}".format)
        assert found.startswith("other programs use about 1.0 of 2 cores; with 2 threads")
        assert found.endswith("stop those programs, or continue with 1")
        assert threads.newly_crowded("continue with {}".format) is None
    assert ComputeThreads(warning="said at the start", ranks=1).newly_crowded("continue with {}".format) is None


def looked(threads: ComputeThreads, machine: Callable, seen: list[Use]) -> list[str | None]:
    """What is said at each of some looks at a machine."""
    said = []
    for each in seen:
        machine(each)
        said.append(threads.newly_free("continue with {}".format))
    return said


def test_cores_that_others_needed_at_the_start_are_said_to_be_free_once_when_they_stay_so(machine, monkeypatch):
    machine(BESIDE)
    with compute_threads(CPU) as threads:
        assert looked(threads, machine, [IDLE]) == [None]  # too early to say
        monkeypatch.setattr(processors, "LATER_SECONDS", 0.0)
        pauses = ([IDLE] * (FREE_LOOKS - 1) + [BESIDE]) * 3
        assert not any(looked(threads, machine, pauses))
        *before, found = looked(threads, machine, [IDLE] * FREE_LOOKS)
        assert not any(before)
        assert found == (
            "other programs no longer need the cores: 4 cores can be used, but this run goes on with 3 threads, which "
            "decide its rounding; to use all, continue with 4"
        )
        assert torch.get_num_threads() == 3
        assert not any(looked(threads, machine, [BESIDE] * 2 + [IDLE] * 2 * FREE_LOOKS))


@pytest.mark.parametrize(
    "uses", [[IDLE], [use(4, busy=6.0), use(4, place="b", busy=6.0)]], ids=["free from the start", "other cores, too"]
)
def test_nothing_is_said_of_free_cores_where_none_were_needed_or_not_all_are_seen(machine, monkeypatch, uses):
    monkeypatch.setattr(processors, "LATER_SECONDS", 0.0)
    machine(*uses)
    with compute_threads(CPU) as threads:
        torch.set_num_threads(1)
        assert not any(looked(threads, machine, [IDLE] * 2 * FREE_LOOKS))


def test_a_number_that_the_user_chose_is_not_said_to_be_too_small(machine, monkeypatch):
    monkeypatch.setattr(processors, "LATER_SECONDS", 0.0)
    machine(BESIDE)
    with compute_threads(CPU, asked=2) as threads:
        assert not any(looked(threads, machine, [IDLE] * 2 * FREE_LOOKS))


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group of this machine that allows the time of 1.5 cores."""
    name = f"unigrad-test-{os.getpid()}"
    quotas = {"cpu": {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "150000"}, "": {"cpu.max": "150000 100000"}}
    for controller, files in quotas.items():
        folder = Path("/sys/fs/cgroup", controller, name)
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            for file, content in files.items():
                (folder / file).write_text(content)
            yield folder
            return
        except OSError:
            continue
        finally:
            folder.rmdir()
    pytest.skip("no control group can be made: /sys/fs/cgroup has no controller for this user to divide")


def say_quota(group: Path, said: Path) -> None:
    (group / "cgroup.procs").write_text(str(os.getpid()))
    said.write_text(str(quota()))


def test_the_quota_of_a_real_group_is_found(group, tmp_path):
    child = start(say_quota, group, tmp_path / "said")
    child.join()
    assert (tmp_path / "said").read_text() == "1.5"
