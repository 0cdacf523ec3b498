"""Reads the files of whole steps in another process, so that its threads do not take turns with those of this one.

Threads of one process share Python's interpreter lock: each file that is read makes the thread that trains wait, and be
woken again. The other process gets the places of a step's images and reads them, in threads of its own, into memory
that both share; this process receives one message per step. What it could not read, or had no memory for, is left to
this process, as if there were no other one: it decides nothing, and has no state but open files.

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
from ..files.open_files import read_into
from ..files.places import Place, find
from .threads import Threads

FAILED, SILENT = -1, -2  # instead of the start of an image: it could not be read, or did not answer in time
Part = tuple[int, int]  # start and length of an image in the memory of its step
_START = "import sys; sys.path[:] = {!r}; from {} import serve; serve({}, {}, {}, {}, {})"


class Apart:
    """The other process, as seen from this one.

    Args:
        threads: number of reading threads.
        timeout: seconds after which a file that does not answer counts as silent.
        steps: how many steps may be in memory at the same time.
        size: bytes of memory for each; what is not used takes none.
    """

    def __init__(self, threads: int, timeout: float, steps: int, size: int) -> None:
        self.timeout = timeout
        self._free = list(range(steps))
        self._held: dict[int, int] = {}  # the memory of a step
        self._answers: dict[int, list[Part]] = {}
        own, other = socket.socketpair()
        file = os.memfd_create("encoded images", 0)
        with other:
            os.ftruncate(file, steps * size)
            whole = np.frombuffer(mmap.mmap(file, steps * size), np.uint8)
            passed = other.fileno(), file
            start = _START.format(sys.path, __name__, *passed, size, threads, timeout)
            self._process = subprocess.Popen(
                [sys.executable, "-c", start], pass_fds=passed, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
            )
        os.close(file)
        self._memories = whole.reshape(steps, size)
        self._connection = Connection(own.detach())

    def ask(self, step: int, places: Sequence[Place]) -> bool:
        """Begins to read the images of a step; False if it cannot."""
        if self._connection.closed or not self._free:
            return False
        memory = self._free.pop()
        try:
            self._connection.send((memory, places))
        except OSError:
            self.close()
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
                    found, parts = self._connection.recv()
                    self._answers[found] = parts
                elif clock.since(began) > 2 * self.timeout:
                    self.close()
            except (OSError, EOFError):
                self.close()
        parts = self._answers.pop(memory)
        if any(start == SILENT for start, _ in parts):  # its bytes may still come: nothing else may be written there
            del self._held[step]
        data = self._memories[memory]
        return [start if start < 0 else data[start : start + length] for start, length in parts]

    def done(self, step: int) -> None:
        """Gives the memory of a step to another one."""
        if (memory := self._held.pop(step, None)) is not None:
            self._free.append(memory)

    def close(self) -> None:
        """Ends the process; arrays that are in use stay as they are."""
        if self._connection.closed:
            return
        self._connection.close()
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):  # while it waits for a dead disk, nothing ends it
            self._process.wait(1.0)


class _Job:
    """The images of a step while the threads of the other process read them into its memory."""

    def __init__(self, places: Sequence[Place], memory: memoryview) -> None:
        self.places, self.memory = places, memory
        self.parts: list[Part | None] = [None] * len(places)
        self.began: list[float | None] = [None] * len(places)
        self._used = 0
        self._changed = threading.Condition()

    def read(self, number: int) -> None:
        self.began[number] = clock.now()
        try:
            part = self._read(self.places[number])
        except OSError:  # the process that asks reads it again, and finds out what is wrong
            part = FAILED, 0
        with self._changed:
            self.parts[number] = part
            if None not in self.parts:
                self._changed.notify()

    def _read(self, place: Place) -> Part:
        file, at, length = find(place)
        with self._changed:
            start = self._used
            if not 0 < length <= len(self.memory) - start:
                return FAILED, 0
            self._used += length
        read_into(file, at, self.memory[start : start + length])
        return start, length

    def wait(self, timeout: float, threads: Threads) -> list[Part]:
        """The parts of the memory; SILENT for images that did not answer in time."""
        with self._changed:
            while missing := [began for began, part in zip(self.began, self.parts, strict=True) if part is None]:
                if self._changed.wait(0.1):
                    continue
                threads.relieve(timeout)
                if all(began is not None and clock.since(began) > timeout for began in missing):
                    break
            return [(SILENT, 0) if part is None else part for part in self.parts]


def serve(connection: int, file: int, size: int, threads: int, timeout: float) -> None:
    """Reads what is asked for over a connection, until that is closed or the process that asks is gone."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    parent, asking, readers = os.getppid(), Connection(connection), Threads(threads)
    whole = memoryview(mmap.mmap(file, 0))
    jobs: queue.SimpleQueue[tuple[int, _Job]] = queue.SimpleQueue()
    threading.Thread(target=_answer, args=(asking, jobs, readers, timeout), daemon=True).start()
    try:
        while True:
            while not asking.poll(1.0):
                if os.getppid() != parent:
                    return
            memory, places = asking.recv()
            job = _Job(places, whole[memory * size : (memory + 1) * size])
            jobs.put((memory, job))
            for number in range(len(places)):
                readers.call(partial(job.read, number))
    except (EOFError, OSError):
        pass
    finally:
        os._exit(0)  # without waiting for threads


def _answer(asking: Connection, jobs: "queue.SimpleQueue[tuple[int, _Job]]", readers: Threads, timeout: float) -> None:
    while True:
        memory, job = jobs.get()
        parts = job.wait(timeout, readers)
        try:
            asking.send((memory, parts))
        except OSError:
            os._exit(0)
