"""Threads that compute on too few cores are noticed, with the number that would fit."""

from __future__ import annotations

import os
import time

import pytest
import torch
from forked import start

from unigrad_fast.runtime import process_group
from unigrad_fast.runtime.processors import Use, Watch, crowded


def use(threads: int, cores: int = 8, own: float = 0.0, busy: float | None = 0.0, **more) -> Use:
    place = more.get("place", "node")
    return Use((place, tuple(range(cores))), more.get("quota"), threads, own, busy)


@pytest.mark.parametrize(
    ("uses", "said"),
    [
        ([use(8)], None),
        ([use(8, busy=8.0, own=8.0)], None),  # it is busy itself
        ([use(1, cores=1, busy=1.0)], None),  # one thread cannot be fewer
        ([use(2, cores=2, busy=None)], None),
        ([use(2, cores=2, busy=1.1)], "OMP_NUM_THREADS=1"),
        ([use(8, busy=3.0, own=1.0)], "OMP_NUM_THREADS=6"),
        ([use(8), use(8, place="another")], None),
        ([use(8), use(8)], "16 threads of 2 ranks share the time of 8 cores"),
        ([use(8), use(8)], "OMP_NUM_THREADS=4"),
        ([use(1, cores=2)] * 3, "start fewer ranks"),
        ([use(8, quota=2.5)], "OMP_NUM_THREADS=2"),
        ([use(1, quota=0.5)], None),
        ([use(4, busy=4.0, own=1.0), use(4, busy=4.0, own=1.0)], "use about 2.0 of 8 cores"),
        ([use(4, busy=2.0, own=1.0), use(4, busy=2.0, own=1.0)], None),  # the other rank
    ],
)
def test_threads_that_wait_for_each_other_are_told_what_would_fit(uses, said):
    found = crowded(uses)
    assert found is None if said is None else said in found, found


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


@pytest.mark.parametrize(("chosen", "threads"), [("", 1), ("2", 2)])
def test_torch_takes_no_more_threads_than_a_rank_has_cores(monkeypatch, chosen, threads):
    before = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", chosen)
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    monkeypatch.setattr(process_group, "usable_cores", lambda ranks: 1)
    try:
        torch.set_num_threads(2)
        with process_group.session("cpu"):
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
