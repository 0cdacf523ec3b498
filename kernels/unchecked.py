"""The operators of a training step for a caller whose arguments were checked before, or who made them.

They take what their namesakes in `functional` take, and go past torch's dispatcher where nothing needs to see them.
`functional` takes the host as long again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import ops
from .dispatch import exact_dtype, needs_dispatcher


def unit_embeddings(
    embeddings: Sequence[Tensor],
    dtype: torch.dtype,
    nonfinite: Tensor,
    *,
    raised: Tensor | None = None,
    ticket: Tensor | None = None,
    since: int = 0,
    spare: int = 0,
) -> tuple[Tensor, Tensor]:
    """See `functional.unit_embeddings`."""
    units = (ops.OPERATORS if needs_dispatcher() else ops).unit_embeddings
    return units(embeddings, dtype, nonfinite, raised, ticket, since, spare)


def sum_tails_(gathered_MC: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
    """What the ranks say of rows that they gave, each with a tail (see `tails`); zeros are left in its place.

    Args:
        gathered_MC: the rows of all ranks, of each as many.
        ranks: how many.

    Returns:
        The number of rows over all ranks, a scalar in fp32 (float64 for float64), and int32 flags [4]: the first and
        the second flag of any rank, and the same, raised too where no rank has a row.
    """
    return (ops.OPERATORS if needs_dispatcher() else ops).sum_tails_(gathered_MC, ranks)


def update_correlation_(
    correlation: Tensor,
    unit_MC: Tensor,
    *,
    decay: Tensor,
    count: Tensor,
    skip: Tensor | None = None,
    updates: Tensor | None = None,
    working: Tensor | None = None,
) -> None:
    """See `functional.update_correlation_`."""
    update = (ops.OPERATORS if needs_dispatcher() else ops).update_correlation_
    update(correlation, unit_MC, decay, count, skip, updates, 0, working, None)


def unigrad_gradient(
    unit_MC: Tensor,
    inverse_norm_M: Tensor,
    target_KC: Tensor,
    correlation: Tensor,
    *,
    balance: float,
    scale: float,
    first: Tensor | None = None,
    second: Tensor | None = None,
    ratio: Tensor | None = None,
    nonfinite: Tensor | None = None,
    skip: Tensor | None = None,
    updates: Tensor | None = None,
    ticket: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `functional.unigrad_gradient`."""
    rows = (inverse_norm_M, target_KC, first, second, ratio)
    state = (nonfinite, skip, updates, ticket)
    gradient = (ops.OPERATORS if needs_dispatcher() else ops).unigrad_gradient
    return gradient(unit_MC, correlation, *rows, *state, balance, scale, exact_dtype(unit_MC), None)
