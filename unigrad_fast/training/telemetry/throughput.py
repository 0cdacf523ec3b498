"""Length of a run and its speed: images per second, share of time spent waiting for data, time left."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

WINDOW = 50  # steps over which the running throughput is averaged


@dataclass(frozen=True)
class Length:
    """Optimizer steps of a whole run, of one of its epochs, and from one evaluation to the next."""

    total_steps: int
    steps_per_epoch: int
    evaluation_every: int

    def epoch(self, step: int) -> float:
        """Epochs, with fraction, completed after a step."""
        return step / self.steps_per_epoch

    def evaluations_left(self, step: int) -> int:
        return math.ceil((self.total_steps - step) / self.evaluation_every)


class Throughput:
    """Images per second over the last steps and over the run, excluding evaluation.

    Args:
        length: length of the run.
        clock: seconds, monotonic.
        earlier: what `so_far` returned in the previous process.
    """

    def __init__(self, length: Length, clock: Callable[[], float], earlier: Mapping[str, Any]) -> None:
        self.length, self.clock = length, clock
        self.started = clock() - earlier.get("wall_seconds", 0.0)
        self.evaluations: list[float] = list(earlier.get("evaluation_seconds", []))  # seconds of each
        self.excluded = 0.0  # seconds of this process's evaluations
        self.images = 0
        # (training time at the step's end, images until then, seconds waited for data until then)
        self.marks: deque[tuple[float, int, float]] = deque(maxlen=WINDOW + 1)
        self.first: tuple[float, int, float] | None = None
        self.waited = 0.0

    def step(self, images: int, data_seconds: float) -> None:
        self.images += images
        self.waited += data_seconds
        self.marks.append((self.clock() - self.excluded, self.images, self.waited))
        # Counting starts at the end of the first step, which includes the start-up of loader and libraries.
        self.first = self.first or self.marks[0]

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Time inside counts as evaluation."""
        start = self.clock()
        try:
            yield
        finally:
            self.evaluations.append(self.clock() - start)
            self.excluded += self.evaluations[-1]

    def recent(self) -> dict[str, float]:
        """`images_per_second` and `data_wait_share` over the window; empty before the second step."""
        seconds, images, waited = self._between(self.marks[0] if self.marks else None)
        return {"images_per_second": images / seconds, "data_wait_share": waited / seconds} if seconds > 0 else {}

    def overall(self) -> float | None:
        """Images per second of training since the end of the first step."""
        seconds, images, _ = self._between(self.first)
        return images / seconds if seconds > 0 else None

    def seconds_left(self, step: int) -> float | None:
        """Seconds for the remaining steps at the recent pace and for the evaluations among them."""
        seconds = self._between(self.marks[0] if self.marks else None)[0]
        if seconds <= 0:
            return None
        per_step = seconds / (len(self.marks) - 1)
        per_evaluation = sum(self.evaluations) / max(len(self.evaluations), 1)
        return (self.length.total_steps - step) * per_step + self.length.evaluations_left(step) * per_evaluation

    def so_far(self) -> dict[str, Any]:
        """Seconds of the run, including earlier processes, and of each evaluation, as JSON values."""
        return {"wall_seconds": self.clock() - self.started, "evaluation_seconds": self.evaluations}

    def _between(self, start: tuple[float, int, float] | None) -> tuple[float, ...]:
        return tuple(b - a for a, b in zip(start, self.marks[-1], strict=True)) if start else (0.0, 0, 0.0)
