"""Orderly exit when the scheduler takes the machine away, the terminal is closed, or the user types Ctrl-C.

SIGTERM, SIGUSR1, SIGHUP and SIGINT ask all ranks to save and exit; a signal that was ignored before, as under `nohup`,
stays ignored. It is enough if one rank gets the signal: at the end of each step the ranks exchange three flags in a
collective on the host, whose result is read one step later so that nobody waits for it. The other two flags say that a
rank has news or cannot continue. A second signal ends the process immediately; but since a scheduler, a terminal and a
launcher may all deliver the same signal, one that arrives within two seconds of the first is taken for the same.

A process that is a caller's, a script's or a notebook's, is not ended: inside of `raising` the same moments raise.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist

from unigrad_fast.runtime import fallback
from unigrad_fast.runtime.errors import INTERRUPTED, PREEMPTED, Preempted

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)
SAME_SIGNAL_SECONDS = 2.0
ON_REQUEST = 1  # a status below those of signals: the run was asked to end well
_raises = ContextVar("raises", default=False)


@contextmanager
def raising() -> Iterator[None]:
    """Inside, signals end no process: where nothing is to be saved, and at a second signal, its main thread raises."""
    token = _raises.set(True)
    try:
        yield
    finally:
        _raises.reset(token)


class Preemption:
    """Watches for the signals; a context manager. Entered in another thread than the main one, it does not see any.

    Attributes:
        note: called with status and message just before the process exits without saving.
        asked: the signal that this process received, if any.
        status: exit status of the run, once `agreed` has returned that it must end; ON_REQUEST without a signal.

    Signals are noticed even while the main thread waits inside a library: the interpreter writes each to a socket
    immediately, and a thread of our own reads it.
    """

    def __init__(self) -> None:
        self.note: Callable[[int, str], None] = lambda status, said: None
        self.asked: signal.Signals | None = None
        self.status = PREEMPTED
        self._nothing_to_save = False
        self._sent: tuple[dist.Work, torch.Tensor] | None = None
        self._raises, self._handlers = _raises.get(), dict[int, Any]()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Preemption:
        if threading.current_thread() is not threading.main_thread():  # which alone may set handlers
            return self
        heeded = [each for each in SIGNALS if signal.getsignal(each) != signal.SIG_IGN]
        if self._raises:
            self._handlers = {each: signal.signal(each, lambda number, frame: self._heed(number)) for each in heeded}
            return self
        self._reading, self._writing = socket.socketpair()
        self._writing.setblocking(False)
        # Replaces the default, which would end the process; `_watch` handles the signal.
        self._handlers = {each: signal.signal(each, lambda number, frame: None) for each in heeded}
        self._wakeup = signal.set_wakeup_fd(self._writing.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, name="preemption", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.settle(kind)
        if self._thread is not None:
            signal.set_wakeup_fd(self._wakeup)
        for each, handler in self._handlers.items():
            signal.signal(each, handler)
        if self._thread is None:
            return
        self._writing.close()  # which ends the thread
        self._thread.join()
        self._reading.close()

    def settle(self, kind: type[BaseException] | None = None, *_: object) -> None:
        """Call before the process group ends: waits for the last exchange of flags, unless there was an error."""
        sent, self._sent = self._sent, None
        if kind is None and sent is not None:
            sent[0].wait()

    def agreed(self, news: bool = False, ends: bool = False, stops: bool = False) -> tuple[bool, bool, bool]:
        """Call on all ranks at the end of each step.

        Returns:
            Whether, one step earlier, any rank was asked to exit, had news, or could not continue.

        Args:
            news: this rank has something to exchange with all; repeated until all know.
            ends: this rank cannot continue, so all must end.
            stops: this rank's caller wants the run to end.
        """
        before, self._sent = self._sent, None
        asked = told = ended = False
        if before is not None:
            work, flags = before
            work.wait()
            self.status = int(flags[0]) or PREEMPTED
            asked, told, ended = (bool(flag) for flag in flags)
        if not (asked or ended):
            # Ctrl-C has the largest status, so it wins the maximum.
            asks = ON_REQUEST * stops if self.asked is None else status_of(self.asked)
            flags = torch.tensor([asks, int(news and not told), int(ends)])
            self._sent = dist.all_reduce(flags, dist.ReduceOp.MAX, async_op=True), flags
        return asked, told, ended

    @contextmanager
    def nothing_to_save(self, done: str) -> Iterator[None]:
        """Inside, a signal ends the process immediately with a preemption's status, because nothing needs saving.

        Args:
            done: the message to print then, or of the error to raise.
        """
        self._nothing_to_save, self._done = True, done
        if self.asked is not None:
            self._leave()
        try:
            yield
        finally:
            self._nothing_to_save = False

    def _watch(self) -> None:
        while received := self._reading.recv(1):
            if received[0] in self._handlers:  # else it is handled elsewhere
                self._heed(received[0])

    def _heed(self, number: int) -> None:
        now = time.monotonic()
        if self.asked is None:
            self._first, self.asked = now, signal.Signals(number)
            if self._nothing_to_save:
                self._leave()
            if (os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0") == "0":
                ends = "stops" if self._raises else "exits"
                _say(f"{self.asked.name}: saving after this step; a second signal {ends} at once, without saving")
        elif now - self._first > SAME_SIGNAL_SECONDS:
            if self._raises:
                raise KeyboardInterrupt
            _say(f"second {signal.Signals(number).name}: exiting at once, without saving")
            os._exit(128 + number)

    def _leave(self) -> None:
        status = status_of(self.asked)
        if self._raises:
            self.note(status, self._done)
            raise Preempted(self._done, status)
        word = "interrupted" if self.asked == signal.SIGINT else f"preempted by {self.asked.name}"
        _say(f"{word}: {self._done}")
        self.note(status, self._done)
        os._exit(status)


def status_of(number: signal.Signals) -> int:
    """The exit status of a run that a signal asked to save and exit."""
    return INTERRUPTED if number == signal.SIGINT else PREEMPTED


def _say(message: str) -> None:
    """Print to stderr, unbuffered, even if the main thread holds the stream's lock."""
    with suppress(OSError):  # nobody reads it any more
        os.write(2, f"{message}\n".encode("ascii", fallback.NAME))
