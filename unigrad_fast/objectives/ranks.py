"""What the ranks that share F tell each other: rows, how many they are, whether all are finite.

A training step takes one collective, whatever ranks have: a gather of rows, filled up with zeros to a number that all
ranks agreed on, with a tail that says how many they are and whether all are finite. The host does not wait for it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# The same under two names: torch renames it, and warns of the old one.
_gather_into: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)


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
    _gather_into(all_R2, own[None], group=group)
    images_R, updates_R = all_R2.T.tolist()
    if len(set(updates_R)) > 1:
        raise ValueError(
            f"F has taken {updates_R} batches, by rank: it is not the same on all ranks; load the state dict of the "
            "objective on every rank (DDP does not send F, which is no buffer)"
        )
    return max(images_R)


def gather(own_MC: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The rows of all ranks, in the order of ranks; each gives as many."""
    gathered = own_MC.new_empty(dist.get_world_size(group) * len(own_MC), own_MC.shape[1])
    _gather_into(gathered, own_MC, group=group)
    return gathered
