"""The images of one step while threads read them: a result per place, and files that do not answer."""

import threading
from collections.abc import Callable, Sequence

import numpy as np

from .. import clock
from ..errors import DataError
from .replacement import BLANK, TRIES, Candidates
from .supply import SILENT, Failure
from .threads import Threads


class Turn:
    """A thread's search for an image for one place of a step, starting at the given attempt."""

    def __init__(self, candidates: Candidates, reading: "Reading", place: int, attempt: int = 0, why: str = "") -> None:
        self.candidates, self.reading, self.place, self.attempt, self.why = candidates, reading, place, attempt, why
        self.image = -1
        self.began: float | None = None  # when the request for the current file began
        reading.turns[place] = self

    def __call__(self) -> None:
        try:
            result = self._find()
        except BaseException as error:  # raised again when the step is taken
            result = error
        self.reading.set(self, result)

    def _find(self) -> tuple[int, np.ndarray]:
        """The requested image, or the first usable substitute, and its bytes."""
        candidates, reading = self.candidates, self.reading
        asked = int(reading.asked[self.place])
        while self.attempt <= TRIES:
            image = candidates.image(reading.epoch, asked, self.attempt)
            if image is None:
                return -1, BLANK
            self.image, self.began = image, clock.now()
            data, why = candidates.read(reading.step, image)
            if why is None:
                return image, np.frombuffer(data, np.uint8)
            if not self.fail(why):
                break
        raise DataError(
            f"{candidates.manifest.path(asked)}: neither it nor any of {TRIES} substitutes can be read; the "
            f"last one failed with: {self.why}; check the storage"
        )

    def fail(self, why: str) -> bool:
        """Records that the image is unusable and moves on to the next; False if this turn was abandoned meanwhile."""
        reading = self.reading
        with reading.changed:
            if reading.turns[self.place] is not self:
                return False
            path = self.candidates.manifest.path(self.image)
            reading.failures.append(Failure(reading.step, self.image, path, why))
            self.attempt, self.why, self.began = self.attempt + 1, why, None
        return True


class Reading:
    """One step that is being read: a result per place, in any order."""

    def __init__(self, step: int, epoch: int, asked: np.ndarray) -> None:
        self.step, self.epoch, self.asked = step, epoch, asked
        self.results: list = [None] * len(asked)
        self.turns: list[Turn | None] = [None] * len(asked)  # the turn whose result counts
        self.stalls = [0] * len(asked)
        self.failures: list[Failure] = []
        self.apart: Sequence[int] = ()  # places that another process is reading
        self._left = len(asked)
        self.changed = threading.Condition()

    def set(self, turn: Turn, result: object) -> None:
        with self.changed:
            if self.turns[turn.place] is turn:
                self.results[turn.place] = result
                self._left -= 1
                if not self._left:
                    self.changed.notify()

    def give_up(self) -> None:
        """Stops waiting; places that have not been read get no result."""
        with self.changed:
            self.turns = [None] * len(self.turns)
            self._left = 0

    def keep(self, place: int, result: object) -> None:
        """Sets a result that needs no turn."""
        with self.changed:
            self.results[place] = result
            self._left -= 1

    def abandon(self, turn: Turn, timeout: float) -> None:
        """Records that the file of a turn did not answer; the turn's result no longer counts."""
        turn.fail(f"{SILENT} {timeout:g} s")
        self.turns[turn.place] = None

    def wait(self, timeout: float, threads: Threads, stopped: Callable[[], bool]) -> list[Turn]:
        """Waits until everything is read, or some files time out; returns and abandons the turns of those files."""
        with self.changed:
            while self._left:
                if stopped():
                    raise InterruptedError("the iteration was closed")
                if self.changed.wait(min(timeout, 0.1)):
                    continue
                threads.relieve(timeout)
                stalled = [
                    turn
                    for turn, result in zip(self.turns, self.results, strict=True)
                    if result is None and turn is not None and turn.began is not None
                    if clock.since(turn.began) > timeout
                ]
                for turn in stalled:
                    self.abandon(turn, timeout)
                if stalled:
                    return stalled
        return []
