"""The trained last layers of DINO and SwAV: cosines of embeddings with prototypes.

Shape suffixes: V views, N images of this rank, C embedding width, K prototypes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from unigrad_fast.objectives.originals.original import unit


class UnitPrototypes(nn.Module):
    """SwAV's prototypes: rows of length 1, to which `normalise_` returns them after each optimizer step.

    Args:
        width: C.
        count: K.
    """

    def __init__(self, width: int, count: int):
        super().__init__()
        self.weight = nn.Linear(width, count, bias=False).weight
        self.normalise_()

    def forward(self, rows_VNC: Tensor, frozen: Tensor | None = None) -> Tensor:
        """Cosines [V, N, K], in the dtype of the rows.

        Args:
            frozen: boolean scalar; where it is true, no gradient flows into the weights.
        """
        return unit(rows_VNC) @ thawed(self.weight, frozen).to(rows_VNC.dtype).T

    @torch.no_grad()
    def normalise_(self, skip: Tensor | None = None) -> None:
        """Divide each row by its length; unchanged where `skip`, a scalar on the device, is not 0."""
        unit_KC = nn.functional.normalize(self.weight, dim=-1)
        self.weight.copy_(unit_KC if skip is None else torch.where(skip != 0, self.weight, unit_KC))


class WeightNormalised(nn.Module):
    """DINO's last layer: only the weights' directions count, and with `trains_length` a factor per prototype.

    Args:
        width: C.
        count: K.
        trains_length: whether there are factors, 1 at first.
    """

    def __init__(self, width: int, count: int, trains_length: bool):
        super().__init__()
        self.weight = nn.Linear(width, count, bias=False).weight
        self.length = nn.Parameter(torch.ones(count)) if trains_length else None

    def forward(self, rows_VNC: Tensor, frozen: Tensor | None = None) -> Tensor:
        """Scores [V, N, K]; see `UnitPrototypes`."""
        score_VNK = unit(rows_VNC) @ unit(thawed(self.weight, frozen).to(rows_VNC.dtype)).T
        return score_VNK if self.length is None else score_VNK * thawed(self.length, frozen).to(score_VNK.dtype)


def thawed(weight: Tensor, frozen: Tensor | None) -> Tensor:
    """The weight, without gradient where `frozen` is true."""
    return weight if frozen is None else torch.where(frozen, weight.detach(), weight)
