"""How variants are compared: they take turns, a block each, round after round; ratios are those of one round.

What slows the machine for a while then slows all of them, and a ratio knows little of it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch

Variant = TypeVar("Variant")
Result = TypeVar("Result")


def take_turns(
    blocks: Mapping[Variant, Callable[[], Result]],
    rounds: int,
    *,
    warmup: int = 0,
    report: Callable[[str], object] = lambda what: None,
) -> dict[Variant, list[Result]]:
    """One block of every variant, round after round.

    Args:
        blocks: by variant, what runs a block and returns its result.
        rounds: blocks of each.
        warmup: rounds before them, whose results are dropped.
        report: is told whose turn it is.

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
    """Mean seconds of some runs, until the device is done with them."""
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
    """The norm of an error, relative to what is exact."""
    return (torch.linalg.vector_norm(found.double() - exact) / torch.linalg.vector_norm(exact)).item()


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def ratio_row(what: str, above: Sequence[float], below: Sequence[float], **more: object) -> dict:
    """A row of the ratios of two variants' figures, one per round: median, least and most.

    Args:
        what: names the ratio.
        above, below: figures of the same rounds.
        more: what else the row says.
    """
    ratios = [a / b for a, b in zip(above, below, strict=True)]
    return {"what": what, "unit": "ratio", **more, **spread(ratios)}
