"""What ranks exchange: rows, their number, and whether all are finite; and sums and gathers with a gradient.

A training step takes one collective, however many images each rank has: a gather of rows, padded with zeros to a number
that all ranks agreed on, with a tail that says how many are real and whether all are finite. The host does not wait.

A rank's loss may depend on rows of other ranks. The backward of a sum or gather over ranks adds up, for each row, the
gradients of all ranks' losses, each counted once. When the engine then averages gradients over ranks, the result is the
gradient of the mean loss.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from unigrad_fast.runtime.collectives import gather_into


def size(group: dist.ProcessGroup | None) -> int:
    """Number of ranks in a group (None is the default group); 1 without torch.distributed."""
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def agree_on_most_images(images: int, updates: Tensor, group: dist.ProcessGroup | None) -> int:
    """The largest number of images on any rank; the host waits.

    Args:
        images: number of images on this rank.
        updates: number of batches that F was updated with on this rank.

    Raises:
        ValueError: on all ranks, if F was not updated with the same number of batches on each.
    """
    own = torch.stack([torch.full_like(updates, images), updates])
    all_R2 = own.new_empty(dist.get_world_size(group), 2)
    gather_into(all_R2, own[None], group=group)
    images_R, updates_R = all_R2.T.tolist()
    if len(set(updates_R)) > 1:
        raise ValueError(
            f"the objective's state differs between ranks: updated with {updates_R} batches; load its state dict "
            "on every rank (DDP does not broadcast F because it is not a buffer)"
        )
    return max(images_R)


def begin_gather(own_MC: Tensor, group: dist.ProcessGroup | None, asynchronous: bool) -> tuple[Tensor, Any]:
    """The rows of all ranks, in rank order, and what to wait for before reading them; None if they are complete.

    Every rank must give the same number.
    """
    gathered = own_MC.new_empty(dist.get_world_size(group) * len(own_MC), own_MC.shape[1])
    work = gather_into(gathered, own_MC, group=group, async_op=asynchronous)
    return gathered, work if asynchronous else None


def exchange_columns(own_MR: Tensor, sizes: list[int], group: dist.ProcessGroup | None) -> list[Tensor]:
    """Exchange columns for rows: send each rank its rows, receive every rank's columns of this rank's rows.

    Args:
        own_MR: this rank's columns for the rows of all ranks, the same number of rows for each rank.
        sizes: number of columns on each rank.
    """
    rows, columns = own_MR.shape[0] // len(sizes), own_MR.shape[1]
    received = own_MR.new_empty(rows * sum(sizes))
    parts = [rows * size for size in sizes]
    dist.all_to_all_single(received, own_MR.reshape(-1), parts, [rows * columns] * len(sizes), group=group)
    return [part.view(rows, size) for part, size in zip(received.split(parts), sizes, strict=True)]


def largest(flag: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The maximum of a flag over ranks."""
    most = flag.clone()
    dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    return most


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
        return begin_gather(own_MC.contiguous(), group, asynchronous=False)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output: Tensor):
        return _summed(grad_output, ctx.group).chunk(size(ctx.group))[dist.get_rank(ctx.group)], None


def _summed(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total
