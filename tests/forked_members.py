"""Members of a comparison are forked from its process, with a thin encoder, not started by a fresh interpreter."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from thin import thin

from unigrad_fast.comparison import running
from unigrad_fast.runtime.preemption import SIGNALS


class Forked:
    """What `running` uses of `subprocess.Popen`."""

    def __init__(self, pid: int):
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


@contextmanager
def forked_members() -> Iterator[None]:
    with mock.patch.object(running, "start", _fork):
        yield


def _fork(words: Sequence[str], environment: Mapping[str, str], log: Path) -> Forked:
    sys.stdout.flush()
    if pid := os.fork():
        return Forked(pid)
    status = 1
    try:
        os.setsid()
        running._end_with_parent()
        signal.set_wakeup_fd(-1)
        for number in SIGNALS:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(environment)
        os.closerange(3, 1 << 12)  # as an interpreter that is started does: among them is the lock of the folder
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(file, stream)
        from unigrad_fast.cli import main

        with thin():
            status = main(list(words))
        sys.stdout.flush()
    finally:
        os._exit(status)
