"""Reads the files of whole steps in another process, so that its threads do not take turns with those of this one.

Threads of one process share Python's interpreter lock: each file that is read makes the thread that trains wait, and be
woken again. The other process gets the places of a step's images, reads them in threads of its own, and writes their
bytes into memory that both share; this process receives one message per step. What it could not read is left to this
process, as if there were no other one: it decides nothing, and has no state but open files.

It is a fresh interpreter that runs nothing of the user's program (so that needs no `if __name__ == "__main__"`), and
imports neither torch nor DALI. It ends when this process closes the connection or is gone; signals are left to this
process.
"""

import mmap
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection

import numpy as np

from .. import clock
from ..files.places import Place, read_place
from .threads import Threads

FAILED, SILENT = -1, -2  # instead of the length of an image: it could not be read, or did not answer in time
_START = "import sys; sys.path[:] = {!r}; from {} import serve; serve({}, {}, {}, {})"


class Apart:
    """The other process, as seen from this one.

    Args:
        threads: number of reading threads.
        timeout: seconds after which a file that does not answer counts as silent.
        steps: how many steps may be in memory at the same time.
    """

    def __init__(self, threads: int, timeout: float, steps: int) -> None:
        self.timeout = timeout
        self._files = [os.memfd_create("encoded images", 0) for _ in range(steps)]
        self._maps: list[mmap.mmap | None] = [None] * steps
        self._free = list(range(steps))
        self._held: dict[int, int] = {}  # the memory of a step
        self._answers: dict[int, list[int]] = {}
        own, other = socket.socketpair()
        with other:
            passed = (other.fileno(), *self._files)
            start = _START.format(sys.path, __name__, passed[0], passed[1:], threads, timeout)
            self._process = subprocess.Popen(
                [sys.executable, "-c", start], pass_fds=passed, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
            )
        self._connection = Connection(own.detach())

    def ask(self, step: int, places: Sequence[Place]) -> bool:
        """Begins to read the images of a step; False if it cannot."""
        if self._connection.closed or not self._free:
            return False
        memory = self._free.pop()
        try:
            self._connection.send((memory, places))
        except OSError:
            self._end()
            return False
        self._held[step] = memory
        return True

    def answer(self, step: int, stopped: Callable[[], bool]) -> list[np.ndarray | int]:
        """The encoded images of a step that was begun, uint8; FAILED or SILENT for those that were not read.

        An empty list if the process is gone. The arrays are valid until `done`. Raises InterruptedError if stopped.
        """
        memory, began = self._held[step], clock.now()
        while memory not in self._answers:
            if stopped():
                raise InterruptedError("the iteration was closed")
            if self._connection.closed:
                return []
            try:
                if self._connection.poll(0.1):
                    found, lengths = self._connection.recv()
                    self._answers[found] = lengths
                elif clock.since(began) > 2 * self.timeout:
                    self._end()
            except (OSError, EOFError):
                self._end()
        lengths = self._answers.pop(memory)
        ends = np.maximum(lengths, 0).cumsum().tolist()
        data = self._mapped(memory, ends[-1])
        return [length if length < 0 else data[end - length : end] for length, end in zip(lengths, ends, strict=True)]

    def done(self, step: int) -> None:
        """Gives the memory of a step to another one."""
        if (memory := self._held.pop(step, None)) is not None:
            self._free.append(memory)

    def close(self) -> None:
        """Ends the process and gives the memory back once no array uses it."""
        self._end()
        self._maps.clear()
        while self._files:
            os.close(self._files.pop())

    def _end(self) -> None:
        if self._connection.closed:
            return
        self._connection.close()
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):  # while it waits for a dead disk, nothing ends it
            self._process.wait(1.0)

    def _mapped(self, memory: int, size: int) -> np.ndarray:
        """The memory, mapped again if it has grown."""
        found = self._maps[memory]
        if found is None or len(found) < size:
            found = self._maps[memory] = mmap.mmap(self._files[memory], max(size, 1))
        return np.frombuffer(found, np.uint8)


class _Job:
    """The images of a step while the threads of the other process read them."""

    def __init__(self, places: Sequence[Place]) -> None:
        self.places = places
        self.results: list[bytes | None] = [None] * len(places)
        self.began: list[float | None] = [None] * len(places)
        self._changed = threading.Condition()

    def read(self, number: int) -> None:
        self.began[number] = clock.now()
        try:
            data = read_place(self.places[number])
        except OSError:  # the process that asks reads it again, and finds out what is wrong
            data = b""
        with self._changed:
            self.results[number] = data
            if None not in self.results:
                self._changed.notify()

    def wait(self, timeout: float, threads: Threads) -> list[bytes | None]:
        """The bytes of each image: empty if it could not be read, None if it did not answer in time."""
        with self._changed:
            while missing := [began for began, data in zip(self.began, self.results, strict=True) if data is None]:
                if self._changed.wait(0.1):
                    continue
                threads.relieve(timeout)
                if all(began is not None and clock.since(began) > timeout for began in missing):
                    break
            return list(self.results)


def serve(connection: int, files: Sequence[int], threads: int, timeout: float) -> None:
    """Reads what is asked for over a connection, until that is closed or the process that asks is gone."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    parent, asking, readers = os.getppid(), Connection(connection), Threads(threads)
    jobs: queue.SimpleQueue[tuple[int, _Job]] = queue.SimpleQueue()
    threading.Thread(target=_answer, args=(asking, files, jobs, readers, timeout), daemon=True).start()
    try:
        while True:
            while not asking.poll(1.0):
                if os.getppid() != parent:
                    return
            memory, places = asking.recv()
            job = _Job(places)
            jobs.put((memory, job))
            for number in range(len(places)):
                readers.call(partial(job.read, number))
    except (EOFError, OSError):
        pass
    finally:
        os._exit(0)  # without waiting for threads


def _answer(
    asking: Connection,
    files: Sequence[int],
    jobs: "queue.SimpleQueue[tuple[int, _Job]]",
    readers: Threads,
    timeout: float,
) -> None:
    while True:
        memory, job = jobs.get()
        results, end = job.wait(timeout, readers), 0
        for data in results:
            end += os.pwrite(files[memory], data, end) if data else 0
        try:
            asking.send((memory, [SILENT if data is None else len(data) or FAILED for data in results]))
        except OSError:
            os._exit(0)
