"""An objective of all ranks together: whom it asks, and how their rows come to it.

Shape suffixes: W ranks, V views, N images of this rank, K images of all ranks, C embedding width.
"""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unigrad_fast.kernels.structures import DIGIT, TAIL, tail_rows
from unigrad_fast.objectives import ranks
from unigrad_fast.objectives.checks import require_whole
from unigrad_fast.objectives.correlation import MovingCorrelation
from unigrad_fast.objectives.shared_sums import gather_over_ranks
from unigrad_fast.objectives.surroundings import require_no_capture


@dataclass
class Gathered:
    """Rows of all ranks.

    Attributes:
        rows: [V, K, C], of each rank as many; where it has fewer images, rows of zeros follow them.
        is_image: bool [K]; None: all of them are images.
        count: images, a scalar in the dtype of the rows (fp32 at least).
        own: which of the K are this rank's.
        raised: int32 [2], the flags of all ranks.
    """

    rows: Tensor
    is_image: Tensor | None
    count: Tensor
    own: slice
    raised: Tensor


class OverRanks(nn.Module):
    """What objectives on several ranks have in common.

    Args:
        process_group: ranks that share a batch; None: the default group, or one process when there is none.
        most_images: the most images that a rank can have in a training step, the same on all ranks; None: as many as
            the rank that has the most in the first one, which all ranks find out together.
    """

    def __init__(self, process_group: dist.ProcessGroup | None, most_images: int | None):
        super().__init__()
        if most_images is not None:
            require_whole("most_images", most_images)
        self.process_group, self.most_images = process_group, most_images
        self._agreed: dict[int, int] = {}  # number of ranks: the most images of one

    @property
    def over_ranks(self) -> bool:
        """Whether a batch is one over several ranks: in training mode."""
        return self.training and ranks.size(self.process_group) > 1

    def gather(self, own_VNC: Tensor, raised: Tensor, updates: Tensor) -> Gathered:
        """The rows of all ranks that take part.

        Args:
            own_VNC: this rank's; where they need a gradient, those of other ranks' losses come back to them.
            raised: int32 [2], flags of this rank.
            updates: int64 scalar, batches that the objective's state has taken; the same on all ranks.

        Raises:
            ValueError: this rank has more images than all agreed on; the others drop the step.
        """
        views, images, width = own_VNC.shape
        exact = torch.promote_types(own_VNC.dtype, torch.float32)
        if not self.over_ranks:
            count = torch.full((), images, dtype=exact, device=own_VNC.device)
            return Gathered(own_VNC, None, count, slice(0, images), raised)
        most, size = self._most(images, updates), ranks.size(self.process_group)
        fits, device = images <= most, own_VNC.device
        # Filled in, not copied: the host would wait for a copy.
        digits = [own_VNC.new_full((1,), images // DIGIT**place % DIGIT) for place in range(TAIL - 2)]
        tail = torch.cat([*digits, (raised if fits else torch.ones_like(raised)).to(own_VNC.dtype)])
        tail = nn.functional.pad(tail, (0, tail_rows(width) * width - TAIL)).view(-1, width)
        padded = nn.functional.pad(own_VNC, (0, 0, 0, most - images)) if fits else own_VNC.new_zeros(views, most, width)
        sent = torch.cat([padded.reshape(views * most, width), tail])
        collective = gather_over_ranks if own_VNC.requires_grad else ranks.gather
        all_WMC = collective(sent, self.process_group).view(size, -1, width)
        if not fits:  # now the others wait for this rank no more
            self._refuse(images, most)
        tails_WT = all_WMC[:, views * most :].detach().flatten(1)[:, :TAIL]
        counts_W = sum(tails_WT[:, place].to(torch.int64) * DIGIT**place for place in range(TAIL - 2))
        rows_VWNC = all_WMC[:, : views * most].unflatten(1, (views, most)).transpose(0, 1)
        is_image_WN = torch.arange(most, device=device) < counts_W[:, None]
        rank = dist.get_rank(self.process_group)
        return Gathered(
            rows_VWNC.reshape(views, size * most, width),
            is_image_WN.flatten(),
            counts_W.sum().to(exact),
            slice(rank * most, rank * most + images),
            (tails_WT[:, TAIL - 2 :] != 0).any(0).to(torch.int32),
        )

    def _most(self, images: int, updates: Tensor) -> int:
        if self.most_images is not None:
            return self.most_images
        size = ranks.size(self.process_group)
        if size not in self._agreed:
            require_no_capture("this number of ranks")
            self._agreed[size] = ranks.agree_on_most_images(images, updates, self.process_group)
        return self._agreed[size]

    def _refuse(self, images: int, most: int) -> None:
        how = "most_images" if self.most_images else "the most that a rank had in the first training step"
        raise ValueError(f"this rank has {images} images, more than {most}, {how}; give most_images={images} or more")

    def __deepcopy__(self, memo: dict[int, Any]) -> OverRanks:
        copied = memo[id(self)] = self.__class__.__new__(self.__class__)
        memo[id(self.process_group)] = self.process_group  # a copy shares it: it is no data
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not None:
            warnings.warn(
                f"a process group cannot be pickled: the loaded {type(self).__name__} has the default one; set its "
                "process_group",
                stacklevel=2,
            )
        return {**self.__dict__, "process_group": None}


def take_batch_(average: MovingCorrelation, batch: Gathered, decay: float, skip: Tensor) -> None:
    """Move F with the unit embeddings of all ranks, and count the batch.

    Args:
        average: F, on the device of the batch.
        batch: unit embeddings of the global views.
        decay: ρ.
        skip: int32 scalar; where it is not 0, F keeps its value.
    """
    views = len(batch.rows)
    skip = (skip != 0) | (batch.count == 0)
    count = (views * batch.count).clamp_min(1)
    skip_flag = skip.to(torch.int32)
    average.update_(batch.rows.flatten(0, 1), decay=torch.full_like(count, decay), count=count, skip=skip_flag)
    average.updates.add_(~skip)
