"""Learning rate and target momentum as pure functions of the step, so a run can resume at any step."""

from __future__ import annotations

import math


def learning_rate(
    step: int,
    total_steps: int,
    *,
    peak: float,
    warmup_steps: int,
    kind: str = "cosine",
    min_fraction: float = 0.001,
) -> float:
    """Learning rate of an optimizer step.

    It rises linearly from `min_fraction · peak` at step 0 to `peak` at step `warmup_steps`, then follows a cosine:
    "cosine" reaches `min_fraction · peak` at the last step; "official", as in the authors' code, counts steps from the
    end of the warm-up but divides by the total, and so ends higher (0.71 % of the peak for 5 warm-up epochs of 100).

    Args:
        step: from 0 to `total_steps − 1`.
        peak: the learning rate after the warm-up, already scaled by the batch size.
    """
    if step < warmup_steps:
        fraction = step / warmup_steps
    else:
        period = total_steps if kind == "official" else max(total_steps - 1 - warmup_steps, 1)
        fraction = (1 + math.cos(math.pi * (step - warmup_steps) / period)) / 2
    return peak * (min_fraction + (1 - min_fraction) * fraction)


def target_momentum(step: int, total_steps: int, *, initial: float, final: float) -> float:
    """Momentum of the target branch at a step: a cosine from `initial` at step 0 to `final` at `total_steps`."""
    return final - (final - initial) * (1 + math.cos(math.pi * step / total_steps)) / 2
