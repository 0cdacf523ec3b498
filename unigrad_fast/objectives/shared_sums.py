"""Differentiable sums and gathers over ranks.

A rank's loss may depend on rows of other ranks. Backward sums for each row the gradients of all ranks' losses, each
counted once. When the engine then averages gradients over ranks, the result is the gradient of the mean loss.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from unigrad_fast.objectives import ranks


def sum_over_ranks(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The sum of the ranks' tensors, on every rank; differentiable."""
    return _Sum.apply(tensor, group)


def gather_over_ranks(own_MC: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The rows of all ranks in rank order, the same number from each; differentiable."""
    return _Gather.apply(own_MC, group)


class _Sum(Function):
    @staticmethod
    def forward(ctx, tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        return _summed(tensor, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output: Tensor):
        return _summed(grad_output, ctx.group), None


class _Gather(Function):
    @staticmethod
    def forward(ctx, own_MC: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        return ranks.gather(own_MC.contiguous(), group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output: Tensor):
        return _summed(grad_output, ctx.group).chunk(ranks.size(ctx.group))[dist.get_rank(ctx.group)], None


def _summed(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total
