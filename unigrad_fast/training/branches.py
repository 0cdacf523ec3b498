"""The branches of a step besides the online encoder: the source of targets, and an objective's trained heads.

momentum        a momentum copy of the online encoder embeds the unmixed global views
stop_gradient   the online encoder's own embeddings of the global views; under CutMix it also embeds the unmixed views,
                without gradient, and batch norm's running buffers are updated by both passes
weight_sharing  the same, but the objective lets gradient into both branches, except under CutMix
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from unigrad_fast.config import Config
from unigrad_fast.networks.encoder import Encoder
from unigrad_fast.networks.lockstep import Steps, alone, together
from unigrad_fast.training import needs
from unigrad_fast.training.target import embed, make_copies, make_target, update_target_


class MomentumBranch:
    """Targets from a momentum copy.

    Attributes:
        module: the copy.
        copies: its weights in autocast's dtype, read by its forward pass.
    """

    def __init__(self, encoder: Encoder, dtype: torch.dtype | None):
        self.encoder = encoder
        with needs.target(encoder, dtype):
            self.module = make_target(encoder).to(memory_format=torch.channels_last)
            self.copies = make_copies(self.module, dtype)

    def embed(self, views: Sequence[Tensor], is_mixed: bool) -> list[Tensor] | None:
        """Embeddings of the unmixed global views; None means that the online branch's embeddings serve as targets.

        Args:
            is_mixed: whether the online branch will see mixed views.
        """
        return embed(self.module, self.copies, views)

    def embed_beside(self, online: Steps, views: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Embeddings of the unmixed global views and those of a pass of the online branch, run in lockstep."""
        return embed(self.module, self.copies, views, partial(together, online=online))

    def update_(self, momentum: float | Tensor, skip: Tensor) -> None:
        """Call after a step; changes nothing if `skip` is not 0."""
        update_target_(self.module, self.encoder, momentum, skip, self.copies)


class OnlineBranch:
    """Targets from the online branch itself: no copy, and no pass unless views are mixed."""

    def __init__(self, encoder: Encoder):
        self.encoder = encoder
        self.module = nn.Module()
        self.copies: Mapping[str, Tensor] = {}

    def embed(self, views: Sequence[Tensor], is_mixed: bool) -> list[Tensor] | None:
        """See `MomentumBranch`."""
        return self.encoder(views) if is_mixed else None

    def update_(self, momentum: float | Tensor, skip: Tensor) -> None:
        """There is nothing to update."""


def build_branch(config: Config, encoder: Encoder, dtype: torch.dtype | None) -> MomentumBranch | OnlineBranch:
    """The target branch, made from the encoder before the first step."""
    return MomentumBranch(encoder, dtype) if config.objective.target == "momentum" else OnlineBranch(encoder)


class WithHeads(nn.Module):
    """An encoder and an objective's heads as one module, so that one engine trains and one checkpoint holds all.

    Its forward pass is the encoder's; the objective, which holds the same heads, applies them.
    """

    def __init__(self, encoder: Encoder, heads: Mapping[str, nn.Module]):
        super().__init__()
        # The encoder's parts keep the names they have without heads.
        self.backbone, self.projector = encoder.backbone, encoder.projector
        for name, head in heads.items():
            self.add_module(name, head)
        self._encode = encoder.forward

    def forward(self, views: Sequence[Tensor], run: Callable[[Steps], Any] = alone) -> Any:
        """The encoder's forward pass."""
        return self._encode(views, run)


def heads_of(objective: nn.Module) -> dict[str, nn.Module]:
    """The objective's parts with weights that an optimizer must train, by name; empty for most methods."""
    return {
        name: part
        for name, part in objective.named_children()
        if any(parameter.requires_grad for parameter in part.parameters())
    }
