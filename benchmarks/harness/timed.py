"""Measures steps in turns: first the memory of each, then blocks long enough to time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from unigrad_fast.benchmarks.harness.memory import peak_bytes
from unigrad_fast.benchmarks.harness.turns import seconds, take_turns
from unigrad_fast.runtime.quiet import without_warnings

WARMUP = 2  # steps before the one whose memory is measured
LEAST_ROUNDS = 3
MOST_STEPS = 1000  # per block


class Timed:
    """A step to measure.

    Args:
        name: name of the variant.
        step: the step.
        release: frees what the step leaves behind.
        device: where it computes.

    Attributes:
        milliseconds: time per step, one value per round.
        memory: peak bytes of a step beyond those before it; None until measured.
    """

    def __init__(self, name: str, step: Callable[[], object], release: Callable[[], object], device: torch.device):
        self.name, self.step, self.release, self.device = name, step, release, device
        self.milliseconds: list[float] = []
        self.memory: int | None = None

    def __str__(self) -> str:
        return self.name

    def take_memory(self) -> None:
        with without_warnings():
            self.memory = peak_bytes(self.step, self.release, self.device, WARMUP)

    def plan_block(self, block_seconds: float) -> None:
        """Choose the number of steps per block."""
        self.step()  # recreates what was released after the measurement of memory
        self.estimate = seconds(self.step, self.device)
        self.steps = min(MOST_STEPS, max(1, int(block_seconds / self.estimate)))

    def block(self) -> float:
        """Milliseconds per step of a block; a block of several steps is preceded by one that fills the caches."""
        if self.steps > 1:
            self.step()
        return seconds(self.step, self.device, self.steps) * 1e3


def time_in_turns(
    timed: Sequence[Timed], repetitions: int, most_seconds: float, report: Callable[[str], object]
) -> None:
    """Time all of them, taking turns block by block; fewer rounds than `repetitions` if they exceed `most_seconds`."""
    round_seconds = sum(each.estimate * (each.steps + (each.steps > 1)) for each in timed)
    rounds = min(repetitions, max(LEAST_ROUNDS, int(most_seconds / round_seconds)))
    for each, milliseconds in take_turns({each: each.block for each in timed}, rounds, report=report).items():
        each.milliseconds = milliseconds
