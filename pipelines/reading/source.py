"""Reads the encoded images of each step ahead, in threads."""

from collections.abc import Callable

import numpy as np

from .. import clock
from ..errors import DataError
from ..manifest import Manifest
from .attempts import Reading, Turn
from .damage import Damaged
from .replacement import Candidates
from .supply import Supply
from .threads import Threads

THREADS = 8  # hides the latency of network storage
STALLS = 3  # images that do not answer for one place before the storage counts as lost


class Source:
    """Reads the images of steps, some steps ahead.

    Args:
        indices: the epoch and the images (int64 [N]) of a step.
        last: step after the last one; None for no end.
        ahead: number of steps to read ahead.
        timeout: seconds after which a file that does not answer counts as bad.
        seed, known: as in `Candidates`.
        damaged: images that were found to be bad, with the reasons; new ones are added.
        stopped: returns True once the result is no longer needed; polled while files do not answer.
        outlasts: if neither an image nor its substitutes can be read, use one that was read and say so in
            `Supply.lost`, instead of raising an error.
        threads: number of reading threads.
    """

    def __init__(
        self,
        manifest: Manifest,
        indices: Callable[[int], tuple[int, np.ndarray]],
        *,
        last: int | None,
        ahead: int,
        timeout: float,
        damaged: Damaged,
        seed: int | None = None,
        known: dict[tuple[int, int], str] | None = None,
        stopped: Callable[[], bool] = lambda: False,
        outlasts: bool = False,
        threads: int = THREADS,
    ) -> None:
        self.outlasts, self.lost = outlasts, ""
        self._spare: tuple[int, np.ndarray] | None = None  # an image that could be read, and its bytes
        self.manifest, self.indices, self.last, self.ahead = manifest, indices, last, ahead
        self.timeout, self.damaged, self.stopped = timeout, damaged, stopped
        self.candidates = Candidates(manifest, seed, {} if known is None else known, damaged)
        self._threads = Threads(threads)
        self._begun: dict[int, Reading] = {}
        self._taken: dict[int, Supply] = {}  # may be requested again

    def take(self, step: int) -> Supply | None:
        """The images of a step; None after the last one.

        If a step was taken but is not done, only the images that turned out bad are read again.
        """
        for number in range(step, step + 1 + self.ahead):
            if number not in self._begun and not (self.last is not None and number >= self.last):
                self._begun[number] = self._begin(number)
        reading = self._begun.pop(step, None)
        if reading is None:
            return None
        try:
            supply = self._finish(reading)
            # An image may have turned out bad since it was read.
            while not supply.lost and any(self._is_bad(image, step) for image in supply.index.tolist()):
                self._taken[step] = supply
                supply = self._finish(self._begin(step))
        except InterruptedError:
            self._begun[step] = reading
            raise
        if not supply.lost:  # otherwise places hold images of other places
            self._taken[step] = supply
        return supply

    def done(self, step: int) -> None:
        """Forgets a step, which will not be requested again."""
        self._taken.pop(step, None)

    def close(self) -> None:
        """Ends each thread as soon as it has finished its file."""
        self._threads.close()

    def _begin(self, step: int) -> Reading:
        taken = self._taken.get(step)
        if taken is None:
            reading = Reading(step, *self.indices(step))
            places = range(len(reading.asked))
        else:
            reading = Reading(step, taken.epoch, taken.asked)
            places = self._keep(taken, reading)
        turns = [Turn(self.candidates, reading, place) for place in places]
        for turn in turns:
            self._threads.call(turn)
        return reading

    def _keep(self, taken: Supply, reading: Reading) -> list[int]:
        """Copies the usable results of a taken step into a reading; returns the places to read again."""
        again, failures = [], list(taken.failures)
        for place, image in enumerate(taken.index.tolist()):
            if not self._is_bad(image, reading.step):
                reading.keep(place, (image, taken.data[place]))
                continue
            again.append(place)
            for tried in self.candidates.before(reading.epoch, int(taken.asked[place]), image):
                failures.remove(next(failure for failure in failures if failure.image == tried))
        reading.failures += failures
        return again

    def _is_bad(self, image: int, step: int) -> bool:
        return image >= 0 and self.damaged.reason(image, step) is not None

    def _finish(self, reading: Reading) -> Supply:
        began = clock.now()
        while stalled := reading.wait(self.timeout, self._threads, self.stopped):
            for turn in stalled:
                reading.stalls[turn.place] += 1
                self.damaged.leave_out(turn.image, reading.step, turn.why)
                path = self.manifest.path(int(reading.asked[turn.place]))
                if reading.stalls[turn.place] == STALLS:
                    self._lose(
                        f"{path}: neither it nor {STALLS - 1} substitutes could be read within {self.timeout:g} s; "
                        "check the storage"
                    )
                elif self.outlasts and clock.since(began) > STALLS * self.timeout:
                    waited = STALLS * self.timeout
                    self._lose(f"{path} and others could not be read within {waited:g} s; check the storage")
            if self.lost:
                reading.give_up()
                break
            for turn in stalled:
                self._threads.call(Turn(self.candidates, reading, turn.place, turn.attempt, turn.why))
        self._fill(reading)
        index, data = zip(*reading.results, strict=True)
        failures = sorted(reading.failures, key=lambda failure: failure.image)
        return Supply(reading.step, reading.epoch, reading.asked, np.array(index), list(data), failures, self.lost)

    def _lose(self, why: str) -> None:
        if not self.outlasts:
            raise DataError(why)
        self.lost = self.lost or why

    def _fill(self, reading: Reading) -> None:
        """Raises the error of a place, or fills each lost place with an image that was read."""
        for place, result in enumerate(reading.results):
            if isinstance(result, DataError):
                self._lose(str(result))
                reading.results[place] = None
            elif isinstance(result, BaseException):
                raise result
        gaps = [place for place, result in enumerate(reading.results) if result is None]
        read = [each for each in reading.results if each is not None and not self._is_bad(each[0], reading.step)]
        if read:
            self._spare = read[0]
        elif gaps and (self._spare is None or self._is_bad(self._spare[0], reading.step)):
            raise DataError(self.lost)
        for place in gaps:
            reading.results[place] = read[place % len(read)] if read else self._spare
