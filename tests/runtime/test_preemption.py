"""Signals: the first is heeded at the end of a step, or at once where all is saved; a second ends the process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from unigrad_fast.runtime.preemption import SIGNALS, Preemption

ROOT = Path(__file__).resolve().parents[2]


def child(body: str) -> subprocess.Popen:
    """A process that runs `body`, in which `preemption` watches; it has printed "ready" when this returns."""
    code = f"""
import sys, threading, time
sys.path.insert(0, {str(ROOT)!r})
from unigrad_fast.runtime import preemption as module
module.SAME_SIGNAL_SECONDS = 0.0
preemption = module.Preemption()
with preemption:
{body}
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
    )
    assert process.stdout.readline() == "ready\n"
    return process


# Waiting in C, where the interpreter runs no handlers, as in a collective.
BLOCKED = """
    import ctypes
    lock, mutex = ctypes.CDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
    lock(mutex)
    print("ready", flush=True)
    lock(mutex)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_a_process_that_waits_in_a_library(number):
    process = child(f"""
    def tell():
        while preemption.asked is None: time.sleep(0.001)
        print("asked", flush=True)
    threading.Thread(target=tell, daemon=True).start()
    {BLOCKED}
""")
    process.send_signal(number)
    assert process.stdout.readline() == "asked\n"
    assert process.poll() is None
    process.send_signal(number)
    assert process.wait(60) == 128 + number
    assert "exiting at once, without saving" in process.stderr.read()


@pytest.mark.parametrize(
    ("number", "status", "word"),
    [(signal.SIGHUP, 75, "preempted by SIGHUP"), (signal.SIGINT, 130, "interrupted")],
)
def test_where_all_is_saved_one_signal_ends_the_process(number, status, word):
    process = child(f"""
    evaluation = preemption.nothing_to_save("the checkpoint after step 7 is saved")
    evaluation.__enter__()
    {BLOCKED}
""")
    process.send_signal(number)
    assert process.wait(60) == status
    assert process.stderr.read() == f"{word}: the checkpoint after step 7 is saved\n"


def test_handlers_are_as_before_afterwards():
    before = [signal.getsignal(number) for number in SIGNALS]
    with Preemption():
        assert all(signal.getsignal(number) != handler for number, handler in zip(SIGNALS, before, strict=True))
    assert [signal.getsignal(number) for number in SIGNALS] == before
    assert signal.set_wakeup_fd(-1) == -1


def test_what_nohup_has_ignored_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Preemption() as preemption:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN and preemption.asked is None
    finally:
        signal.signal(signal.SIGHUP, before)


def agree(steps: int, asked_rank: int, asked_step: int, number: int = signal.SIGUSR1) -> tuple[int, int]:
    """The step at whose end this rank learns that one was asked, and the status to end with."""
    with Preemption() as preemption:
        for step in range(steps):
            if step == asked_step and dist.get_rank() == asked_rank:
                os.kill(os.getpid(), number)
                while preemption.asked is None:
                    pass
            if preemption.agreed()[0]:
                return step, preemption.status
    return -1, preemption.status


def test_all_ranks_learn_of_one_signal_at_the_same_step(workers):
    assert workers(3).run(agree, 6, 1, 2) == [(3, 75)] * 3
    assert workers(3).run(agree, 6, 1, 2, signal.SIGINT) == [(3, 130)] * 3
    assert workers(3).run(agree, 6, 9, 2) == [(-1, 75)] * 3
