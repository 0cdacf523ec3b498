"""F in shards: each rank updates one block of its rows, and multiplies the embeddings of all ranks with that block.

    rows of F     ← ρ·rows + (1−ρ)/count · Σ m[rows]ᵀ m        m of all ranks, gathered
    u·F[:, rows]  = u · F[rows]ᵀ                               u of all ranks, gathered; F is symmetric

The columns of u·F that a rank computed for the other ranks are sent back to them. Mirrored entries of F are computed on
different ranks, so F is symmetric only up to rounding.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unigrad_fast.kernels import mirror_, ops
from unigrad_fast.objectives import ranks
from unigrad_fast.objectives.correlation import Gradient, MovingCorrelation
from unigrad_fast.objectives.over_ranks import OwnRows

ALIGNED = 16  # block sizes are multiples of this many rows, so that the kernels load 128 bits at a time


def row_bounds(width: int, size: int) -> list[int]:
    """The first row of each rank's block of F, followed by the end of the last block."""
    unit = ALIGNED if width >= 4 * ALIGNED * size else 1
    return [min(width, unit * (rank * -(-width // unit) // size)) for rank in range(size + 1)]


class ShardedCorrelation(MovingCorrelation):
    """This rank's rows of F.

    Its state is `correlation` [R, C], `first_row` and `updates`. It loads a state dict of the same rows, or this rank's
    rows from a state dict that holds all of F.

    Args:
        width: C.
        group: ranks that share F.

    Raises:
        ValueError: fewer rows than ranks.
    """

    def __init__(self, width: int, group: dist.ProcessGroup | None):
        rank, size = dist.get_rank(group), ranks.size(group)
        if width < size:
            raise ValueError(f"width {width} cannot be sharded over {size} ranks; use placement='replicated'")
        bounds = row_bounds(width, size)
        super().__init__(width, bounds[rank + 1] - bounds[rank])
        self.rank, self.shards, self.first_row = rank, size, bounds[rank]
        self.sizes = [last - first for first, last in pairwise(bounds)]

    def gradient_of(self, online: OwnRows, product_dtype: torch.dtype, kernels: Any) -> Gradient:
        """See `MovingCorrelation.gradient_of`: sends the rows to all ranks and receives their columns of u·F."""
        unit_MC = online.begin().finish().rows
        blocks = ranks.exchange_columns(self.product(unit_MC, product_dtype), self.sizes, online.group)
        rows = online.views * online.images
        return partial(ops.gradient_of_blocks, [block[:rows] for block in blocks])

    @torch.no_grad()
    def gather(self, group: dist.ProcessGroup | None) -> Tensor:
        """All of F on every rank, mirrored from its upper triangle; all ranks must call this together."""
        own = self.whole()
        width = own.shape[1]
        correlation_CC = own.new_empty(width, width)
        first = 0
        for rank, rows in enumerate(self.sizes):
            block = correlation_CC[first : first + rows]
            if rank == dist.get_rank(group):
                block.copy_(own)
            dist.broadcast(block, group=group, group_src=rank)
            first += rows
        return mirror_(correlation_CC)

    @torch.no_grad()
    def effective_rank(self, group: dist.ProcessGroup | None) -> Tensor:
        """See `UniGrad.effective_rank`; all ranks must call this together."""
        own = self.whole()
        sums = torch.stack([own.diagonal(self.first_row).sum(), torch.linalg.vector_norm(own).square()])
        dist.all_reduce(sums, group=group)
        return sums[0].square() / sums[1]

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "first_row"] = torch.tensor(self.first_row)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        *_, errors = arguments
        state, key, own = dict(state_dict), prefix + "correlation", self.correlation
        first_row = state.pop(prefix + "first_row", None)
        if first_row is not None and int(first_row) != self.first_row:
            errors.append(f"{prefix}first_row is {int(first_row)} in the state dict and {self.first_row} here")
            return
        if first_row is None and key in state and tuple(state[key].shape) == (own.shape[1],) * 2:
            state[key] = state[key][self.first_row : self.first_row + own.shape[0]].clone()
        super()._load_from_state_dict(state, prefix, *arguments)
