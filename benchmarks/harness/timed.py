"""Steps that are measured in turns: the memory of each first, then blocks of as many steps as take a while."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from unigrad_fast.benchmarks.harness.memory import peak_bytes
from unigrad_fast.benchmarks.harness.turns import seconds, take_turns
from unigrad_fast.runtime.quiet import without_warnings

WARMUP = 2  # steps before the one whose memory is measured
LEAST_ROUNDS = 3
MOST_STEPS = 1000  # of a block


class Timed:
    """A step.

    Args:
        name: what is measured.
        step: the step.
        release: lets go of what it leaves behind.
        device: where it computes.

    Attributes:
        milliseconds: what was found, one per round.
        memory: bytes at the peak of a step beyond what it starts with; None until it is taken.
    """

    def __init__(self, name: str, step: Callable[[], object], release: Callable[[], object], device: torch.device):
        self.name, self.step, self.release, self.device = name, step, release, device
        self.milliseconds: list[float] = []
        self.memory: int | None = None

    def __str__(self) -> str:
        return self.name

    def take_memory(self) -> int:
        with without_warnings():
            self.memory = peak_bytes(self.step, self.release, self.device, WARMUP)
        return self.memory

    def plan_block(self, block_seconds: float) -> None:
        """Set how many steps make a block."""
        self.step()  # what was looked at meanwhile is there again
        self.estimate = seconds(self.step, self.device)
        self.steps = min(MOST_STEPS, max(1, int(block_seconds / self.estimate)))

    def block(self) -> float:
        """Milliseconds per step of a block; of short ones, a step before it fills the caches."""
        if self.steps > 1:
            self.step()
        return seconds(self.step, self.device, self.steps) * 1e3


def time_in_turns(
    timed: Sequence[Timed], repetitions: int, most_seconds: float, report: Callable[[str], object]
) -> None:
    """All of them, block by block in turn; fewer rounds than `repetitions` where they would take `most_seconds`."""
    round_seconds = sum(each.estimate * (each.steps + (each.steps > 1)) for each in timed)
    rounds = min(repetitions, max(LEAST_ROUNDS, int(most_seconds / round_seconds)))
    for each, milliseconds in take_turns({each: each.block for each in timed}, rounds, report=report).items():
        each.milliseconds = milliseconds
