"""What the ranks that share F tell each other: rows, how many they are, whether all are finite.

A training step takes one collective, whatever ranks have: a gather of rows, filled up with zeros to a number that all
ranks agreed on, with a tail that says how many they are and whether all are finite. The host does not wait for it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unigrad_fast.runtime.collectives import gather_into


def size(group: dist.ProcessGroup | None) -> int:
    """Ranks of a group, None the default one; 1 without torch.distributed."""
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def agree_on_most_images(images: int, updates: Tensor, group: dist.ProcessGroup | None) -> int:
    """The most images that a rank has now; the host waits.

    Args:
        images: this rank's.
        updates: how many batches F has taken here.

    Raises:
        ValueError: on all ranks, where F has not taken the same number of batches on all of them.
    """
    own = torch.stack([torch.full_like(updates, images), updates])
    all_R2 = own.new_empty(dist.get_world_size(group), 2)
    gather_into(all_R2, own[None], group=group)
    images_R, updates_R = all_R2.T.tolist()
    if len(set(updates_R)) > 1:
        raise ValueError(
            f"F has taken {updates_R} batches, by rank: it is not the same on all ranks; load the state dict of the "
            "objective on every rank (DDP does not send F, which is no buffer)"
        )
    return max(images_R)


def gather(own_MC: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The rows of all ranks, in the order of ranks; each gives as many."""
    return begin_gather(own_MC, group, asynchronous=False)[0]


def begin_gather(own_MC: Tensor, group: dist.ProcessGroup | None, asynchronous: bool) -> tuple[Tensor, Any]:
    """`gather`, and what is to be waited for before its result is read; None where it is there."""
    gathered = own_MC.new_empty(dist.get_world_size(group) * len(own_MC), own_MC.shape[1])
    work = gather_into(gathered, own_MC, group=group, async_op=asynchronous)
    return gathered, work if asynchronous else None


def exchange_columns(own_MR: Tensor, sizes: list[int], group: dist.ProcessGroup | None) -> list[Tensor]:
    """Of this rank's rows the columns that each rank has.

    Args:
        own_MR: this rank's columns for the rows of all ranks, of each as many.
        sizes: how many columns each rank has.
    """
    rows, columns = own_MR.shape[0] // len(sizes), own_MR.shape[1]
    received = own_MR.new_empty(rows * sum(sizes))
    parts = [rows * size for size in sizes]
    dist.all_to_all_single(received, own_MR.reshape(-1), parts, [rows * columns] * len(sizes), group=group)
    return [part.view(rows, size) for part, size in zip(received.split(parts), sizes, strict=True)]


def largest(flag: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The largest of the ranks' numbers."""
    most = flag.clone()
    dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    return most
