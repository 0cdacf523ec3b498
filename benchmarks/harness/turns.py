"""Compares variants: they take turns, one block each per round, and ratios are taken within a round.

So a temporary slowdown of the machine hits all variants, and hardly affects ratios.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TypeVar

import torch

Variant = TypeVar("Variant")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Turns:
    """Number and length of the turns of a training step's variants.

    Attributes:
        repetitions: number of rounds; in each, every variant runs one block.
        steps, warmup: measured steps per block, and unmeasured steps before them.
    """

    repetitions: int = 3
    steps: int = 2
    warmup: int = 1

    @property
    def all_steps(self) -> int:
        return self.repetitions * (self.warmup + self.steps)

    def as_row(self) -> dict[str, int]:
        return {**asdict(self), "threads": torch.get_num_threads()}


def take_turns(
    blocks: Mapping[Variant, Callable[[], Result]],
    rounds: int,
    *,
    warmup: int = 0,
    report: Callable[[str], object] = lambda what: None,
) -> dict[Variant, list[Result]]:
    """Run one block of every variant per round.

    Args:
        blocks: by variant, a function that runs a block and returns its result.
        rounds: number of blocks of each variant.
        warmup: rounds before them, whose results are dropped.
        report: called with the variant whose turn it is.

    Returns:
        The results of each variant, one per round.
    """
    results: dict[Variant, list[Result]] = {variant: [] for variant in blocks}
    for number in range(-warmup, rounds):
        for variant, block in blocks.items():
            report(f"{f'round {number + 1} of {rounds}' if number >= 0 else 'warm-up'}: {variant}")
            result = block()
            if number >= 0:
                results[variant].append(result)
    return results


def seconds(run: Callable[[], object], device: torch.device, times: int = 1) -> float:
    """Mean seconds per run, until the device has finished."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(times):
        run()
    synchronize(device)
    return (time.perf_counter() - start) / times


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def distance(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The norm of the error relative to the norm of the exact tensor."""
    return (torch.linalg.vector_norm(found.double() - exact) / torch.linalg.vector_norm(exact)).item()


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def ratio_row(what: str, above: Sequence[float], below: Sequence[float], **more: object) -> dict:
    """A row with the ratios of two variants' figures, one per round: median, least and most.

    Args:
        what: name of the ratio.
        above, below: numerators and denominators of the same rounds.
        more: further entries of the row.
    """
    ratios = [a / b for a, b in zip(above, below, strict=True)]
    return {"what": what, "unit": "ratio", **more, **spread(ratios)}


def median_and_range(row: Mapping, digits: int, prefix: str = "") -> tuple[str, str]:
    """Two table cells for a row's spread; `prefix` selects another spread of the row by its keys' prefix."""
    median, least, most = (f"{row[prefix + key]:,.{digits}f}" for key in ("median", "least", "most"))
    return median, f"{least} to {most}"
