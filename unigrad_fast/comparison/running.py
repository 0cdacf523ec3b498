"""Trains the members of a comparison, each by `unigrad-fast pretrain` in a process of its own, a few at a time.

A signal is handed to the members, which save and exit; then this process exits with their status. Should this process
be killed, the system sends them SIGTERM, so that they save and exit, too.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from unigrad_fast.comparison.figures import Ended
from unigrad_fast.comparison.folder import STATUS, ComparisonFolder
from unigrad_fast.comparison.members import Member
from unigrad_fast.runtime.errors import Preempted
from unigrad_fast.runtime.preemption import Preemption, status_of
from unigrad_fast.runtime.run_folder import RunFolder
from unigrad_fast.runtime.wording import count
from unigrad_fast.training.telemetry.progress import duration

POLL_SECONDS = 0.1
PROGRESS_SECONDS = 60.0  # between two lines of progress without a terminal
LAST_EVENTS = 1 << 14  # bytes of metrics.jsonl that are looked at
PR_SET_PDEATHSIG = 1


@dataclass
class Running:
    """A member that is being trained.

    Attributes:
        place: which of the jobs side by side it is.
        began: share of it that was trained before.
    """

    member: Member
    process: subprocess.Popen
    place: int
    began: float


class Progress:
    """How much of all members is trained, and the time left if what is left goes on as fast as so far.

    Args:
        total, done: members, and those that ended before.
        clock: seconds, monotonic.
    """

    def __init__(self, total: int, done: int, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self.total, self.done, self.console, self.clock = total, done, console, clock
        self.begun = self.said = clock()
        self.trained = 0.0  # by this process, in members that have ended
        self.status = console.status("") if console.is_terminal else None

    def __enter__(self) -> None:
        if self.status is not None:
            self.status.start()

    def __exit__(self, *_: object) -> None:
        if self.status is not None:
            self.status.stop()

    def line(self, running: Sequence[Running]) -> str:
        shares = [trained_share(each.member) for each in running]
        fraction = (self.done + sum(shares)) / self.total
        here = self.trained + sum(max(0.0, share - each.began) for share, each in zip(shares, running, strict=True))
        speed = here / max(self.clock() - self.begun, 1e-9)
        left = duration(self.total * (1 - fraction) / speed if speed > 0 else None)
        names = ", ".join(f"{each.member.name} {100 * at:.0f} %" for at, each in zip(shares, running, strict=True))
        done = f"{self.done} of {count(self.total, 'member')} done, {100 * fraction:.0f} %, left {left}"
        return f"{done}; training {names}" if names else done

    def tell(self, running: Sequence[Running], changed: bool) -> None:
        """Show the line: always on a terminal, elsewhere when members begin or end, and every minute."""
        if self.status is not None:
            self.status.update(self.line(running))
        elif changed or self.clock() - self.said >= PROGRESS_SECONDS:
            self.said = self.clock()
            self.console.print(self.line(running), soft_wrap=True)


def trained_share(member: Member) -> float:
    """The share of a member's epochs that its metrics say are done."""
    with (
        suppress(OSError, ValueError, KeyError, IndexError),
        open(RunFolder(member.config.output).metrics, "rb") as file,
    ):
        file.seek(max(0, os.fstat(file.fileno()).st_size - LAST_EVENTS))
        last = [line for line in file.read().splitlines() if line.endswith(b"}")][-1]
        return min(1.0, json.loads(last)["epoch"] / member.config.schedule.epochs)
    return 0.0


def start(words: Sequence[str], environment: Mapping[str, str], log: Path) -> subprocess.Popen:
    """`unigrad-fast` with these words in a process of its own; what it prints goes to a file."""
    with open(log, "wb") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "unigrad_fast", *words],
            env={**environment},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches it through this process only
            preexec_fn=_end_with_parent,
        )


_libc = ctypes.CDLL(None)


def _end_with_parent() -> None:
    if hasattr(_libc, "prctl"):  # Linux
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


class Runner:
    """Trains the members that are not done.

    Args:
        places: for each job side by side, variables of its environment.
        extra: words for every command.
        ended: how far a member is.
        report: called when a member has ended.
    """

    def __init__(
        self,
        members: Sequence[Member],
        folder: ComparisonFolder,
        places: Sequence[Mapping[str, str]],
        extra: Sequence[str],
        ended: Callable[[Member], Ended],
        report: Callable[[], None],
        console: Console,
    ) -> None:
        self.folder, self.places, self.extra, self.ended, self.report = folder, places, extra, ended, report
        self.console = console
        self.waiting = [member for member in members if not ended(member).done]
        self.running: list[Running] = []
        self.waited_for: set[str] = set()
        self.progress = Progress(len(members), len(members) - len(self.waiting), console)

    def run(self) -> None:
        """Returns when all have ended.

        Raises:
            Preempted: a signal was received, and the members have saved.
        """
        asked = None
        with Preemption() as preemption, self.progress:
            try:
                while self.waiting or self.running:
                    if asked is None and preemption.asked is not None:
                        asked, self.waiting = preemption.asked, []
                        self._signal(asked)
                    changed = self._finish() + self._begin()
                    self.progress.tell(self.running, changed > 0)
                    time.sleep(POLL_SECONDS)
            except BaseException:
                self._signal(signal.SIGTERM)
                raise
        if asked is not None:
            raise Preempted("the members have saved; the same command continues the comparison", status_of(asked))

    def _signal(self, number: signal.Signals) -> None:
        for each in self.running:
            each.process.send_signal(number)

    def _finish(self) -> int:
        """Note the end of members that have ended; their number."""
        gone = [each for each in self.running if each.process.poll() is not None]
        for each in gone:
            self.running.remove(each)
            log = self.folder.log(each.member)
            with open(log, "ab") as file:
                file.write(f"\n{STATUS} {each.process.returncode}\n".encode())
            self.progress.done += 1
            self.progress.trained += 1 - each.began
            if (failure := self.ended(each.member).failure) is not None:
                self.console.print(f"{each.member.name} failed: {failure} ({log})", soft_wrap=True)
            self.report()
        return len(gone)

    def _begin(self) -> int:
        """Start members in the places that are free; their number."""
        free = sorted({*range(len(self.places))} - {each.place for each in self.running})
        begun = 0
        for member in list(self.waiting):
            if begun == len(free):
                break
            if self._occupied(member):
                continue
            self.waiting.remove(member)
            if self.ended(member).done:  # by another process, meanwhile
                self.progress.done += 1
                continue
            place, began = free[begun], trained_share(member)
            environment = {**os.environ, **self.places[place]}
            process = start((*member.words, *self.extra), environment, self.folder.log(member))
            self.running.append(Running(member, process, place, began))
            begun += 1
        return begun

    def _occupied(self, member: Member) -> bool:
        """Whether another process trains a member: a job of an array, or what a killed comparison left, which saves."""
        occupied = RunFolder(member.config.output).is_occupied()
        if occupied and member.name not in self.waited_for:
            self.waited_for.add(member.name)
            self.console.print(f"{member.name} is being trained by another process; waiting for it", soft_wrap=True)
        return occupied
