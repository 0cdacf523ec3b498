"""Daemon threads: one that waits for a dead disk does not keep the process from ending."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue


class Threads:
    """Runs functions on `count` threads; threads that hang are replaced."""

    def __init__(self, count: int) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._busy: dict[int, float] = {}  # start of the current call, by thread
        self._count = 0
        for _ in range(count):
            self.add()

    def call(self, function: Callable[[], None]) -> None:
        self._calls.put(function)

    def relieve(self, timeout: float) -> None:
        """Starts a new thread for each that has spent more than `timeout` seconds on one call."""
        late = time.monotonic() - timeout
        for number, since in list(self._busy.items()):
            if since < late:
                self._busy.pop(number, None)
                self.add()

    def close(self) -> None:
        with suppress(Empty):
            while True:
                self._calls.get_nowait()
        for _ in range(self._count):
            self._calls.put(None)

    def add(self) -> None:
        self._count += 1
        arguments = self._calls, self._busy, self._count
        threading.Thread(target=_work, args=arguments, name="image reader", daemon=True).start()


def _work(calls: "SimpleQueue[Callable[[], None] | None]", busy: dict[int, float], number: int) -> None:
    while (function := calls.get()) is not None:
        busy[number] = time.monotonic()
        function()
        busy.pop(number, None)
