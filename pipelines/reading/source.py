"""Encoded images of each step, read ahead by threads."""

from collections.abc import Callable

import numpy as np

from ..errors import DataError
from ..manifest import Manifest
from .attempts import Reading, Turn
from .damage import Damaged
from .replacement import Candidates
from .supply import Supply
from .threads import Threads

THREADS = 8  # hides the latency of network storage
STALLS = 3  # images for one place that do not answer, before the storage counts as lost


class Source:
    """Reads the images of steps, some steps ahead.

    Args:
        indices: the epoch and the images (int64 [N]) of a step.
        last: step after the last one; None for no end.
        ahead: steps that are read before they are asked for.
        timeout: seconds after which a file that does not answer counts as bad.
        seed, known: as in `Candidates`.
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
        self.timeout, self.damaged, self.stopped = timeout, damaged, stopped
        self.candidates = Candidates(manifest, seed, known, damaged)
        self._threads = Threads(THREADS)
        self._begun: dict[int, Reading] = {}

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

    def _begin(self, step: int) -> Reading:
        reading = Reading(step, *self.indices(step))
        for place in range(len(reading.asked)):
            self._threads.call(Turn(self.candidates, reading, place))
        return reading

    def _finish(self, reading: Reading) -> Supply:
        while stalled := reading.wait(self.timeout, self._threads, self.stopped):
            for turn in stalled:
                reading.stalls[turn.place] += 1
                self.damaged.leave_out(turn.image, reading.step, turn.why)
                if reading.stalls[turn.place] == STALLS:
                    raise DataError(
                        f"{self.manifest.path(int(reading.asked[turn.place]))}: {STALLS} images in a row could not be "
                        f"read within {self.timeout:g} s, it or others in its place; is the storage reachable?"
                    )
                self._threads.call(Turn(self.candidates, reading, turn.place, turn.attempt, turn.why))
        for result in reading.results:
            if isinstance(result, BaseException):
                raise result
        index, data = zip(*reading.results, strict=True)
        failures = sorted(reading.failures, key=lambda failure: failure.image)
        return Supply(reading.step, reading.epoch, reading.asked, np.array(index), list(data), failures)
