"""Heartbeats: finds out which rank is lost, and on which machine, when a collective has failed or does not end.

A thread of each rank writes a heartbeat into the store about every second, over its own connection: that it is alive,
and how far it has got. Heartbeats are read only when a collective has failed, or a second thread finds that it takes
too long. Rank 0 or torchrun hosts the store; if the store does not answer, its host is lost.

The time-outs of gloo and NCCL would also count time in which all ranks were suspended, so they do not apply.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import NamedTuple

from unigrad_fast.pipelines import clock
from unigrad_fast.runtime.errors import RankLost
from unigrad_fast.runtime.process_group import COLLECTIVE_TIMEOUT, UNLIMITED, World, limit
from unigrad_fast.runtime.rendezvous import say
from unigrad_fast.runtime.torch_private import collectives_begun

LONGEST_BEAT = 1.0  # seconds between two heartbeats of a rank
MISSED = 3  # missed heartbeats after which a rank counts as silent, but not before
LEAST_SILENCE = 2.0  # seconds, because a busy machine may delay a thread
LOOK = 4  # silences after which the store counts as lost; a look takes one, and a busy machine delays it
STUCK = 3  # time-outs, and at least LEAST_STUCK seconds, that ranks which are equally far may wait in one step
LEAST_STUCK = 60.0
SIGNS = (
    *("Connection closed by peer", "Connection reset", "Broken pipe", "Timed out", "timed out", "timeout", "NCCL"),
    *("Read error", "Write error", "remote worker", "Socket closed", "connection was closed"),
)


class Line(NamedTuple):
    """A rank's last heartbeat: heartbeats and collectives so far, its stage, and why it exited, if it did."""

    beats: int
    collectives: int
    stage: str
    left: str = ""


class Attendance:
    """The heartbeat of one rank; made by `attended`.

    Args:
        world: this rank and the others.
        timeout: how long ranks wait for each other. This process ends if it waits longer.
        note: called with a message about the lost rank before this process ends.

    Attributes:
        ends: this process is ended if it waits longer than that inside a library that raises no error, as NCCL.
    """

    def __init__(self, world: World, timeout: timedelta, note: Callable[[str], None]):
        self.hosts, self.rank, self.timeout = world.hosts, world.rank, timeout.total_seconds()
        self.note = note
        self.beat = min(LONGEST_BEAT, self.timeout / 20)
        self.silence = max(MISSED * self.beat, LEAST_SILENCE)
        self._store = world.store.clone()
        self._mine, self._stage = Line(0, 0, "its start"), "its start"
        self._allowed = max(timeout, COLLECTIVE_TIMEOUT).total_seconds()  # until the first stage
        self._alone = True
        self._wake, self._asked, self._ended = threading.Event(), threading.Event(), False
        self._found: str | None = None
        self._looked = threading.Event()
        self._thread = threading.Thread(target=self._attend, name="attendance", daemon=True)
        self._write()
        self._thread.start()
        self._one_ends = threading.Lock()  # held by the thread that ends this process
        threading.Thread(target=self._judge, name="judge", daemon=True).start()

    def at(self, stage: str, alone: bool = False) -> None:
        """Report this rank's stage with the next heartbeat. Before the first stage, long waits are allowed.

        Args:
            alone: each rank may work for long without the others.
        """
        self._stage, self._alone, self._allowed = stage, alone, self.timeout

    def missing(self) -> str | None:
        """Which rank is lost, and what is known about it; None if all ranks answer and are equally far."""
        self._looked.clear()
        self._asked.set()
        self._wake.set()
        began = clock.now()
        while self._thread.is_alive() and clock.since(began) < LOOK * self.silence:
            if self._looked.wait(min(self.beat / 4, clock.BEAT)):
                return self._found
        return self._of_the_store()

    def ends_here(self) -> None:
        """Call before reporting an error: it returns unless this process is being ended already."""
        if not self._one_ends.acquire(blocking=False):
            threading.Event().wait()

    def leave(self, why: str) -> None:
        """Tell the other ranks that this one exits, and why."""
        self._ended = True
        self._wake.set()
        self._thread.join(self.silence)
        if not self._thread.is_alive():
            with suppress(RuntimeError):
                self._write(left=why)

    def await_readers(self) -> None:
        """On rank 0, which hosts the store: wait until the others know which rank is lost, or have had time to."""
        if not self._looked.is_set():  # the store did not answer
            return
        with suppress(RuntimeError):
            self._store.add("attendance/known", 1)
            began = clock.now()
            while self.rank == 0 and self._store.add("attendance/known", 0) < len(self.hosts) - 1:
                if clock.since(began) > 2 * LOOK * self.silence:
                    return
                time.sleep(self.beat / 4)

    def _attend(self) -> None:
        with suppress(RuntimeError):  # the store is gone; `missing` notices that it stays silent
            while not self._ended:
                self._wake.wait(self.beat)
                self._wake.clear()
                self._write()
                if self._asked.is_set():
                    self._asked.clear()
                    self._found = self._look()
                    self._looked.set()

    def _judge(self) -> None:
        """Ends this process once it has waited too long for other ranks, inside whatever library."""
        begun, began = _collectives(), clock.now()  # of the last collective
        while not self._ended:
            time.sleep(min(self.beat, clock.BEAT))
            if (now := _collectives()) != begun:
                begun, began = now, clock.now()
            waited = clock.since(began)
            found = self.missing() or self._stuck(waited) if waited > self._allowed else None
            if found and not self._ended:
                self.ends_here()
                self._end(found)

    def _stuck(self, waited: float) -> str | None:
        if self._alone or waited < max(STUCK * self.timeout, LEAST_STUCK):
            return None
        found = f"all ranks answer, but nothing has been exchanged for {waited:.0f} s, at {self._stage}: {STUCK_BY}"
        with suppress(RuntimeError):
            self._store.set("attendance/found", found)
        return found

    def _end(self, found: str) -> None:
        """End this process, whatever it is waiting for."""
        self.note(f"{found}; {REMEDY}")
        with suppress(OSError, ValueError):  # nobody reads it any more
            sys.stdout.flush()
        say(f"stopped: {found}; {REMEDY}")
        self.await_readers()
        os._exit(3)

    def _of_the_store(self) -> str:
        if "TORCHELASTIC_RUN_ID" in os.environ:
            return f"torchrun on {self.hosts[0]}, where rank 0 is, no longer answers: {GONE}"
        return f"{self._named(0)} no longer answers: {GONE}"

    def _write(self, left: str = "") -> None:
        self._mine = Line(self._mine.beats + 1, _collectives(), self._stage, left)
        self._store.set(f"attendance/{self.rank}", json.dumps(self._mine))

    def _look(self) -> str | None:
        others = [rank for rank in range(len(self.hosts)) if rank != self.rank]
        before, mine = self._lines(others), self._mine
        began = clock.now()
        while clock.since(began) < self.silence:
            time.sleep(min(self.beat / 2, clock.BEAT))
            self._write()
        now = {rank: line for rank, line in self._lines(others).items() if line.left != DONE}
        # One rank's finding holds for all; others might only see that the rank that found it has exited.
        if self._store.check(["attendance/found"]):
            return self._store.get("attendance/found").decode()
        found = self._judged(mine, before, now)
        if found is None or _collectives() != mine.collectives:  # it no longer waits
            return None
        self._store.set("attendance/found", found)
        return found

    def _judged(self, mine: Line, before: dict[int, Line], now: dict[int, Line]) -> str | None:
        for rank, line in now.items():
            if line.left:
                return f"{self._named(rank)} exited at {line.stage}: {line.left}"
        for rank, line in now.items():
            if line.beats == before[rank].beats:
                return f"{self._named(rank)} no longer answers, last heard from at {line.stage}: {GONE}"
        for rank, line in now.items():
            if line.collectives < mine.collectives:
                return f"{self._named(rank)} is still at {line.stage}, and the others wait for it"
        return None

    def _lines(self, ranks: Sequence[int]) -> dict[int, Line]:
        texts = self._store.multi_get([f"attendance/{rank}" for rank in ranks])
        return {rank: Line(*json.loads(text)) for rank, text in zip(ranks, texts, strict=True)}

    def _named(self, rank: int) -> str:
        return f"rank {rank} on {self.hosts[rank]}"


DONE = "its work is done"
GONE = "its process has ended or hangs, or its machine or the network is down"
STUCK_BY = "a GPU hangs, or the network between the ranks is down"
REMEDY = "the same command resumes from the newest checkpoint"


@contextmanager
def attended(
    world: World, timeout: timedelta, note: Callable[[str], None] = lambda said: None
) -> Iterator[Callable[..., None]]:
    """Inside, ranks send heartbeats; yields a function that reports this rank's stage, like `Attendance.at`.

    A rank that waits for the others longer than `timeout`, not counting time in which its process did not run, ends.

    Args:
        note: called with a message about the lost rank, before the process ends or the error is raised.

    Raises:
        RankLost: instead of the error of a collective that failed because another rank is lost.
    """
    if world.size == 1 or world.store is None:
        yield lambda stage, alone=False: None
        return
    attendance = Attendance(world, timeout, note)
    limit(UNLIMITED)
    try:
        yield attendance.at
    except BaseException as error:
        attendance.ends_here()
        missing = attendance.missing() if _is_of_a_collective(error) else None
        said, lost = missing or f"{type(error).__name__}: {error}", f"{missing}; {REMEDY}"
        if missing:
            note(lost)
            attendance.await_readers()
        attendance.leave(" ".join(said.split()))
        if missing is None:
            raise
        if world.device.type == "cuda":  # work pending on the GPU would keep the process from exiting
            say(f"stopped: {lost}")
            os._exit(3)
        raise RankLost(lost) from error
    attendance.leave(DONE)


def _collectives() -> int:
    """Number of collectives that this rank has started; a rank that others wait for has started fewer."""
    with suppress(RuntimeError):  # the process groups are being destroyed
        return collectives_begun()
    return 0


def _is_of_a_collective(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in SIGNS)
