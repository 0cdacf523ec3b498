"""Time of each phase of a step, measured on the device without making the host wait."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

PHASES = ("data", "target", "online", "objective", "backward", "step", "target_update")


class PhaseClock:
    """Marks the end of each phase of a step and sums the milliseconds in between.

    On CUDA the marks are events on the current stream, read one step late, so a phase includes the device's work and
    its waiting. On the CPU they are readings of a host clock.
    """

    def __init__(self, device: torch.device):
        self.on_cuda = device.type == "cuda"
        self._steps: deque[tuple[int, list[tuple[str, float | torch.cuda.Event]]]] = deque()
        self._sums = dict.fromkeys(PHASES, 0.0)
        self._count = 0
        self._stopped = False

    def start(self, step: int) -> None:
        """Call when a step begins."""
        self._steps.append((step, []))
        self.mark("start")

    def mark(self, phase: str) -> None:
        """End the phase that began at the previous mark."""
        if self._stopped:
            return
        if self.on_cuda:
            now = torch.cuda.Event(enable_timing=True)
            now.record()
        else:
            now = time.perf_counter()
        self._steps[-1][1].append((phase, now))

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Ignore marks inside: an event captured in a CUDA graph could not be read."""
        self._stopped = True
        try:
            yield
        finally:
            self._stopped = False

    def read(self, before: int) -> dict[str, float]:
        """Milliseconds per phase, `ms_<phase>`: means over the steps before `before` that were not read yet."""
        while self._steps and self._steps[0][0] < before:
            _, marks = self._steps.popleft()
            for (_, begin), (phase, end) in itertools.pairwise(marks):
                if self.on_cuda:
                    end.synchronize()
                    self._sums[phase] += begin.elapsed_time(end)
                else:
                    self._sums[phase] += 1000 * (end - begin)
            self._count += 1
        means = {f"ms_{phase}": total / max(self._count, 1) for phase, total in self._sums.items()}
        self._sums, self._count = dict.fromkeys(PHASES, 0.0), 0
        return means
