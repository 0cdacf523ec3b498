"""Leaving in good order when the scheduler takes the machine away.

SIGTERM and SIGUSR1 ask all ranks to save and leave. One rank that was told is enough: the ranks tell each other at the
end of each step, in a collective of two numbers on the host whose result is read one step later, so that none waits
for it; the second number says that a rank has news of another kind. A second signal ends the process at once;
schedulers and launchers that pass a signal on both reach a process within moments, so that what follows the first
within two seconds is taken for the same.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from contextlib import contextmanager
from types import FrameType

import torch
import torch.distributed as dist

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
SAME_SIGNAL_SECONDS = 2.0
STATUS = 75  # EX_TEMPFAIL of sysexits.h: try again


class Preemption:
    """Watches for the signals; a context manager, to be entered in the main thread.

    Signals are seen even while the main thread waits in a library: the interpreter writes each to a socket at once,
    and a thread of our own reads it.
    """

    def __init__(self) -> None:
        self.asked: signal.Signals | None = None
        self._nothing_to_save = False
        self._sent: tuple[dist.Work, torch.Tensor] | None = None

    def __enter__(self) -> Preemption:
        self._reading, self._writing = socket.socketpair()
        self._writing.setblocking(False)
        self._handlers = {each: signal.signal(each, _do_nothing) for each in SIGNALS}
        self._wakeup = signal.set_wakeup_fd(self._writing.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, name="preemption", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self._sent is not None:
            self._sent[0].wait()
        signal.set_wakeup_fd(self._wakeup)
        for each, handler in self._handlers.items():
            signal.signal(each, handler)
        self._writing.close()  # which ends the thread
        self._thread.join()
        self._reading.close()

    def agreed(self, news: bool = False) -> tuple[bool, bool]:
        """At the end of each step, on all ranks: whether one of them was asked to end, or had news, a step before.

        Args:
            news: something that this rank wants all to hear of. It is told until all do.
        """
        before, self._sent = self._sent, None
        asked = told = False
        if before is not None:
            work, flags = before
            work.wait()
            asked, told = (bool(flag) for flag in flags)
        if not asked:
            flags = torch.tensor([int(self.asked is not None), int(news and not told)])
            self._sent = dist.all_reduce(flags, dist.ReduceOp.MAX, async_op=True), flags
        return asked, told

    @contextmanager
    def nothing_to_save(self, done: str):
        """While inside, a signal ends the process at once, with the status of a preemption, for all is saved.

        Args:
            done: what is said then.
        """
        self._nothing_to_save, self._done = True, done
        if self.asked is not None:
            self._leave()
        try:
            yield
        finally:
            self._nothing_to_save = False

    def _watch(self) -> None:
        first = None
        while received := self._reading.recv(1):
            number = received[0]
            if number not in SIGNALS:  # Ctrl-C, which the main thread answers
                continue
            now = time.monotonic()
            if first is None:
                first, self.asked = now, signal.Signals(number)
                if self._nothing_to_save:
                    self._leave()
            elif now - first > SAME_SIGNAL_SECONDS:
                _say(f"second {signal.Signals(number).name}: leaving at once, without saving")
                os._exit(128 + number)

    def _leave(self) -> None:
        _say(f"preempted by {self.asked.name}: {self._done}")
        os._exit(STATUS)


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """In place of the default, which would end the process; `Preemption._watch` sees the signal too."""


def _say(message: str) -> None:
    """To stderr, unbuffered, and even when the main thread holds its lock."""
    os.write(2, f"{message}\n".encode())
