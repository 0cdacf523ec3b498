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
from unigrad_fast.runtime.errors import INTERRUPTED, PREEMPTED, Preempted
from unigrad_fast.runtime.preemption import Preemption
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
        began: how much of it was trained before.
    """

    member: Member
    process: subprocess.Popen
    place: int
    began: float


class Progress:
    """How much of all members is trained, and the time left if what is left goes on as fast as so far."""

    def __init__(self, members: Sequence[Member], done: int, console: Console, clock: Callable[[], float]) -> None:
        self.total, self.done, self.console, self.clock = len(members), done, console, clock
        self.begun = self.said = clock()
        self.trained = 0.0  # by this process, in members that have ended
        self.status = console.status("") if console.is_terminal else None

    def line(self, running: Sequence[Running]) -> str:
        parts = [(each.member, trained_share(each.member)) for each in running]
        now = sum(max(0.0, share - each.began) for (_, share), each in zip(parts, running, strict=True))
        fraction = (self.done + sum(share for _, share in parts)) / self.total
        speed = (self.trained + now) / max(self.clock() - self.begun, 1e-9)
        left = duration(self.total * (1 - fraction) / speed if speed > 0 else None)
        training = ", ".join(f"{member.name} {100 * share:.0f} %" for member, share in parts)
        return f"{self.done} of {count(self.total, 'member')} done, {100 * fraction:.0f} %, left {left}" + (
            f"; training {training}" if training else ""
        )

    def tell(self, running: Sequence[Running], now: bool = False) -> None:
        if self.status is not None:
            self.status.update(self.line(running))
            self.status.start()
        elif now or self.clock() - self.said >= PROGRESS_SECONDS:
            self.said = self.clock()
            self.console.print(self.line(running), soft_wrap=True)

    def stop(self) -> None:
        if self.status is not None:
            self.status.stop()


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


def run(
    members: Sequence[Member],
    folder: ComparisonFolder,
    places: Sequence[Mapping[str, str]],
    extra: Sequence[str],
    ended: Callable[[Member], Ended],
    report: Callable[[], None],
    console: Console,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Train all members that are not done.

    Args:
        places: for each job side by side, variables of its environment.
        extra: words for every command.
        ended: how far a member is.
        report: called when a member has ended.

    Raises:
        Preempted: a signal was received, and the members have saved.
    """
    waiting = [member for member in members if not ended(member).done]
    progress = Progress(members, len(members) - len(waiting), console, clock)
    running: list[Running] = []
    forwarded = None
    waited_for: set[str] = set()
    with Preemption() as preemption:
        try:
            while waiting or running:
                if preemption.asked is not None and forwarded is None:
                    forwarded, waiting = preemption.asked, []
                    for each in running:
                        each.process.send_signal(forwarded)
                for each in [each for each in running if each.process.poll() is not None]:
                    running.remove(each)
                    _note_end(each, folder)
                    progress.done += 1
                    progress.trained += 1 - each.began
                    _tell_end(each.member, folder, ended(each.member), console)
                    report()
                    progress.tell(running, now=True)
                for place in sorted({*range(len(places))} - {each.place for each in running}):
                    member = next((each for each in waiting if not _occupied(each, waited_for, console)), None)
                    if member is None:
                        break
                    waiting.remove(member)
                    if ended(member).done:  # by another process, meanwhile
                        progress.done += 1
                        continue
                    began = trained_share(member)
                    process = start((*member.words, *extra), {**os.environ, **places[place]}, folder.log(member))
                    running.append(Running(member, process, place, began))
                    progress.tell(running, now=True)
                progress.tell(running)
                time.sleep(POLL_SECONDS)
        finally:
            progress.stop()
            for each in running:  # after an error of our own
                each.process.send_signal(signal.SIGTERM)
        if preemption.asked is not None:
            status = INTERRUPTED if preemption.asked == signal.SIGINT else PREEMPTED
            raise Preempted("the members have saved; the same command continues the comparison", status)


def _occupied(member: Member, waited_for: set[str], console: Console) -> bool:
    """Whether another process trains a member: a job of an array, or what a killed comparison left, which saves."""
    occupied = RunFolder(member.config.output).is_occupied()
    if occupied and member.name not in waited_for:
        waited_for.add(member.name)
        console.print(f"{member.name} is being trained by another process; waiting for it", soft_wrap=True)
    return occupied


def _note_end(ended: Running, folder: ComparisonFolder) -> None:
    with open(folder.log(ended.member), "ab") as file:
        file.write(f"\n{STATUS} {ended.process.returncode}\n".encode())


def _tell_end(member: Member, folder: ComparisonFolder, at: Ended, console: Console) -> None:
    if at.failure is not None:
        console.print(f"{member.name} failed: {at.failure} ({folder.log(member)})", soft_wrap=True)
