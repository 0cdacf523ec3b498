"""Length of a run in optimizer steps: its epochs, and the evaluations still to come."""

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
        """Epochs, with fraction, completed after a step."""
        return step / self.steps_per_epoch

    def evaluations_left(self, step: int) -> int:
        return math.ceil((self.total_steps - step) / self.evaluation_every)
