"""Reads the encoded images of each step ahead, in threads."""

from collections.abc import Callable, Sequence

import numpy as np

from .. import clock
from ..errors import DataError
from ..manifest import Manifest
from .apart import FAILED, Apart
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
        apart: the process that reads; what it cannot read is read here. It is closed with this source.
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
        apart: Apart | None = None,
    ) -> None:
        self.outlasts, self.lost = outlasts, ""
        self._spare: tuple[int, np.ndarray] | None = None  # an image that could be read, and its bytes
        self.manifest, self.indices, self.last, self.ahead = manifest, indices, last, ahead
        self.timeout, self.damaged, self.stopped = timeout, damaged, stopped
        self.candidates = Candidates(manifest, seed, {} if known is None else known, damaged)
        self._threads = Threads(threads)
        self._apart = apart
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
        """Forgets a step, which will not be requested again; its data may be overwritten."""
        self._taken.pop(step, None)
        if self._apart is not None:
            self._apart.done(step)

    def close(self) -> None:
        """Ends each thread as soon as it has finished its file."""
        self._threads.close()
        if self._apart is not None:
            self._apart.close()

    def _begin(self, step: int) -> Reading:
        taken = self._taken.get(step)
        if taken is None:
            reading = Reading(step, *self.indices(step))
            places = self._ask(reading)
        else:
            reading = Reading(step, taken.epoch, taken.asked)
            places = self._keep(taken, reading)
        self._read(reading, places)
        return reading

    def _read(self, reading: Reading, places: Sequence[int]) -> None:
        turns = [Turn(self.candidates, reading, place) for place in places]
        for turn in turns:
            self._threads.call(turn)

    def _ask(self, reading: Reading) -> Sequence[int]:
        """Asks the other process for all images that are not known to be bad; returns the places to read here."""
        images = reading.asked.tolist()
        if self._apart is None:
            return range(len(images))
        good = [place for place, image in enumerate(images) if self.candidates.known_bad(reading.step, image) is None]
        if not good or not self._apart.ask(reading.step, [self.manifest.place(images[place]) for place in good]):
            return range(len(images))
        reading.apart = good
        return sorted({*range(len(images))}.difference(good))

    def _collect(self, reading: Reading) -> list[Turn]:
        """Takes what the other process has read and begins to read the rest here; returns turns as `Reading.wait`."""
        if not reading.apart:
            return []
        assert self._apart is not None
        answers = self._apart.answer(reading.step, self.stopped)
        places, reading.apart = reading.apart, []
        here, silent = [], []
        for place, answer in zip(places, answers or [FAILED] * len(places), strict=True):
            image = int(reading.asked[place])
            if isinstance(answer, np.ndarray):
                reading.keep(place, (image, answer))
            elif answer == FAILED:
                here.append(place)
            else:
                silent.append(turn := Turn(self.candidates, reading, place))
                turn.image = image
                reading.abandon(turn, self.timeout)
        self._read(reading, here)
        return silent

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
        while stalled := self._collect(reading) or reading.wait(self.timeout, self._threads, self.stopped):
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
            image, data = read[0]
            self._spare = image, data if self._apart is None else data.copy()
        elif gaps and (self._spare is None or self._is_bad(self._spare[0], reading.step)):
            raise DataError(self.lost)
        for place in gaps:
            reading.results[place] = read[place % len(read)] if read else self._spare
