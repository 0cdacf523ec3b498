"""Another program that keeps one core busy, as on a machine that is shared."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

BURN = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"  # ends with the measurement


class Neighbour:
    """A process that computes inside `busy`, and is stopped otherwise; a context manager that ends it."""

    def __enter__(self) -> Neighbour:
        self.process = subprocess.Popen([sys.executable, "-c", BURN])
        self.process.send_signal(signal.SIGSTOP)
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    @contextmanager
    def busy(self) -> Iterator[None]:
        self.process.send_signal(signal.SIGCONT)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGSTOP)
