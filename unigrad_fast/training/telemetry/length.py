"""How long a run is, in optimizer steps: its epochs, and the evaluations that lie ahead."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Length:
    """Steps of a whole run, of one of its epochs, and from one evaluation to the next."""

    total_steps: int
    steps_per_epoch: int
    evaluation_every: int

    @property
    def epochs(self) -> float:
        return self.epoch(self.total_steps)

    def epoch(self, step: int) -> float:
        """Epochs until a step is complete, with their fraction."""
        return step / self.steps_per_epoch

    def evaluations_left(self, step: int) -> int:
        return math.ceil((self.total_steps - step) / self.evaluation_every)
