"""Encoded images of each step, read ahead by threads; what cannot be used is replaced by another image.

Every decision is a function of the seed, the epoch, the image and the state of its file, so all ranks and a run that
is resumed decide alike. What depends on the moment, a disk that did not answer, is kept by the run and given back to
a loader that repeats a step.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

import numpy as np

from .damage import Damaged
from .errors import DataError
from .headers import reason
from .manifest import Manifest
from .parameters import SUBSTITUTE, philox

THREADS = 8  # hides the latency of network storage
TRIES = 16  # substitutes for one image, before the data counts as lost
SILENT = "it could not be read within"  # how the reason begins of a file that did not answer
STALLS = 3  # images for one place that do not answer, before the storage counts as lost

# A black pixel, as a PNG file: stands where no image does.
BLANK = np.frombuffer(
    bytes.fromhex(
        "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de"
        "0000000c49444154789c63606060000000040001f61738550000000049454e44ae426082"
    ),
    np.uint8,
)


@dataclass(frozen=True)
class Failure:
    """An image that was asked for and could not be used.

    Attributes:
        step: of the micro-batch, as in `Batch`.
        image: its position in the manifest.
        path, reason: for people.
    """

    step: int
    image: int
    path: str
    reason: str


@dataclass
class Supply:
    """What one micro-batch of one rank is made of.

    Attributes:
        step, epoch: which one it is.
        asked: int64 [N], the images of the order; the randomness of each place belongs to them.
        index: int64 [N], the images that are taken, -1 for none.
        data: their encoded bytes, uint8.
        failures: what could not be used.
    """

    step: int
    epoch: int
    asked: np.ndarray
    index: np.ndarray
    data: list[np.ndarray]
    failures: list[Failure] = field(default_factory=list)

    @property
    def replaced(self) -> np.ndarray:
        """Bool [N]."""
        return self.index != self.asked


class Source:
    """Reads the images of steps, some steps ahead.

    Args:
        indices: the epoch and the images (int64 [N]) of a step.
        last: step after the last one; None for no end.
        ahead: steps that are read before they are asked for.
        timeout: seconds after which a file that does not answer counts as bad.
        seed: of the choice of substitutes; None takes none, and `BLANK` stands in for the image.
        known: steps and images that failed when this run made them before, and why.
        damaged: reasons of images that were found to be bad, by their number; is added to.
        stopped: whether nobody waits any more; asked while files do not answer.
    """

    def __init__(
        self,
        manifest: Manifest,
        indices: Callable[[int], tuple[int, np.ndarray]],
        *,
        last: int | None,
        ahead: int,
        timeout: float,
        seed: int | None,
        known: dict[tuple[int, int], str],
        damaged: Damaged,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self.manifest, self.indices, self.last, self.ahead = manifest, indices, last, ahead
        self.timeout, self.seed, self.known, self.damaged = timeout, seed, known, damaged
        self.stopped = stopped
        self._threads = _Threads(THREADS)
        self._begun: dict[int, _Reading] = {}

    def take(self, step: int) -> Supply | None:
        """What the step is made of; None after the last one."""
        for number in range(step, step + 1 + self.ahead):
            if number not in self._begun and not (self.last is not None and number >= self.last):
                self._begun[number] = self._begin(number)
        reading = self._begun.pop(step, None)
        return None if reading is None else self._finish(reading)

    def close(self) -> None:
        """Ends the threads, as soon as each is done with its file."""
        self._threads.close()

    def _begin(self, step: int) -> "_Reading":
        reading = _Reading(step, *self.indices(step))
        for place in range(len(reading.asked)):
            self._threads.call(_Turn(self, reading, place))
        return reading

    def _finish(self, reading: "_Reading") -> Supply:
        while stalled := reading.wait(self.timeout, self._threads, self.stopped):
            for turn in stalled:
                reading.stalls[turn.place] += 1
                self.damaged.leave_out(turn.image, reading.step, turn.why)
                if reading.stalls[turn.place] == STALLS:
                    raise DataError(
                        f"{self.manifest.path(int(reading.asked[turn.place]))}: {STALLS} images in a row could not be "
                        f"read within {self.timeout:g} s, it or others in its place; is the storage reachable?"
                    )
                self._threads.call(_Turn(self, reading, turn.place, turn.attempt, turn.why))
        for result in reading.results:
            if isinstance(result, BaseException):
                raise result
        index, data = zip(*reading.results, strict=True)
        failures = sorted(reading.failures, key=lambda failure: failure.image)
        return Supply(reading.step, reading.epoch, reading.asked, np.array(index), list(data), failures)


class _Turn:
    """A thread's search for the image of one place of a step, beginning with the given attempt."""

    def __init__(self, source: Source, reading: "_Reading", place: int, attempt: int = 0, why: str = "") -> None:
        self.source, self.reading, self.place, self.attempt, self.why = source, reading, place, attempt, why
        self.image = -1
        self.began: float | None = None  # when the file was asked for that it waits for
        reading.turns[place] = self

    def __call__(self) -> None:
        try:
            result = self._find()
        except BaseException as error:  # it is raised where the step is taken
            result = error
        self.reading.set(self, result)

    def _find(self) -> tuple[int, np.ndarray]:
        """The image asked for, or the first substitute that can be used, and its bytes."""
        source, reading = self.source, self.reading
        asked = int(reading.asked[self.place])
        while self.attempt <= TRIES:
            self.image = asked
            if self.attempt:
                if source.seed is None:
                    return -1, BLANK
                self.image = substitute(source.seed, reading.epoch, asked, self.attempt, len(source.manifest))
            self.began = time.monotonic()
            why = source.known.get((reading.step, self.image)) or source.damaged.reason(self.image, reading.step)
            if why is None:
                try:
                    if data := source.manifest.read(self.image):
                        return self.image, np.frombuffer(data, np.uint8)
                    why = "the file is empty"
                except OSError as error:
                    why = f"the file cannot be opened: {reason(error)}"
            if not self.fail(why):
                break
        raise DataError(
            f"{source.manifest.path(asked)}: neither it nor {TRIES} other images can be read in its place; the last "
            f"one failed with: {self.why}; is the storage reachable?"
        )

    def fail(self, why: str) -> bool:
        """Notes that the image cannot be used, and goes on to the next; False if this turn was given up meanwhile."""
        reading = self.reading
        with reading.changed:
            if reading.turns[self.place] is not self:
                return False
            path = self.source.manifest.path(self.image)
            reading.failures.append(Failure(reading.step, self.image, path, why))
            self.attempt, self.why, self.began = self.attempt + 1, why, None
        return True


def substitute(seed: int, epoch: int, image: int, attempt: int, count: int) -> int:
    """Which of `count` images stands in for one that cannot be used: another one, if there is."""
    bits = philox(seed, epoch, np.array(image), stream=SUBSTITUTE, block=attempt)
    return (image + 1 + (int(bits[0]) << 32 | int(bits[1])) % max(1, count - 1)) % count


class _Reading:
    """One step that is being read: a result per place, in whatever order they come."""

    def __init__(self, step: int, epoch: int, asked: np.ndarray) -> None:
        self.step, self.epoch, self.asked = step, epoch, asked
        self.results: list = [None] * len(asked)
        self.turns: list[_Turn | None] = [None] * len(asked)  # whose result counts
        self.stalls = [0] * len(asked)
        self.failures: list[Failure] = []
        self._left = len(asked)
        self.changed = threading.Condition()

    def set(self, turn: _Turn, result: object) -> None:
        with self.changed:
            if self.turns[turn.place] is turn:
                self.results[turn.place] = result
                self._left -= 1
                self.changed.notify()

    def wait(self, timeout: float, threads: "_Threads", stopped: Callable[[], bool]) -> list[_Turn]:
        """Waits until all is read, or until some files have not answered in time; their turns, which are given up."""
        with self.changed:
            while self._left:
                if self.changed.wait(min(timeout, 1.0)):
                    continue
                if stopped():
                    raise InterruptedError("the iteration was closed")
                threads.relieve(timeout)
                late = time.monotonic() - timeout
                stalled = [
                    turn
                    for turn, result in zip(self.turns, self.results, strict=True)
                    if result is None and turn.began is not None and turn.began < late
                ]
                for turn in stalled:
                    turn.fail(f"{SILENT} {timeout:g} s")
                    self.turns[turn.place] = None
                if stalled:
                    return stalled
        return []


class _Threads:
    """Threads that outlive no one: one that waits for a dead disk does not keep the process from ending."""

    def __init__(self, count: int) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._busy: dict[int, float] = {}  # since when, by thread
        self._count = 0
        for _ in range(count):
            self._add()

    def call(self, function: Callable[[], None]) -> None:
        self._calls.put(function)

    def relieve(self, timeout: float) -> None:
        """A new thread for each that has been at the same call for longer than `timeout` seconds."""
        late = time.monotonic() - timeout
        for number, since in list(self._busy.items()):
            if since < late:
                self._busy.pop(number, None)
                self._add()

    def close(self) -> None:
        with suppress(Empty):
            while True:
                self._calls.get_nowait()
        for _ in range(self._count):
            self._calls.put(None)

    def _add(self) -> None:
        self._count += 1
        arguments = self._calls, self._busy, self._count
        threading.Thread(target=_work, args=arguments, name="image reader", daemon=True).start()


def _work(calls: "SimpleQueue[Callable[[], None] | None]", busy: dict[int, float], number: int) -> None:
    while (function := calls.get()) is not None:
        busy[number] = time.monotonic()
        function()
        busy.pop(number, None)
