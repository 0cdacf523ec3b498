"""The branches of a step besides the online encoder: where its targets come from, and a trained predictor.

momentum        a momentum copy of the online encoder, which passes over the unmixed global views
stop_gradient   what the online branch makes of the global views; where it sees mixed ones it passes over the
                unmixed ones besides, without gradient, and batch norm's running buffers take both passes
weight_sharing  the same; the objective lets gradient into both branches, but under CutMix
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from unigrad_fast.config import Config
from unigrad_fast.networks.encoder import Encoder
from unigrad_fast.objectives.predictor import Predictor
from unigrad_fast.training import needs
from unigrad_fast.training.target import embed, make_copies, make_target, update_target_


class MomentumBranch:
    """Targets from a momentum copy.

    Attributes:
        module: the copy.
        copies: its weights in autocast's dtype, which its forward pass reads.
    """

    def __init__(self, encoder: Encoder, dtype: torch.dtype | None):
        self.encoder = encoder
        with needs.target(encoder, dtype):
            self.module = make_target(encoder).to(memory_format=torch.channels_last)
            self.copies = make_copies(self.module, dtype)

    def embed(self, views: Sequence[Tensor], is_mixed: bool) -> list[Tensor] | None:
        """Embeddings of the unmixed global views; None: they are those that the online branch makes.

        Args:
            is_mixed: whether the online branch will see them mixed.
        """
        return embed(self.module, self.copies, views)

    def update_(self, momentum: float | Tensor, skip: Tensor) -> None:
        """After a step; where `skip` is not 0 nothing changes."""
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
    """The target branch, from the encoder as it is before the first step."""
    return MomentumBranch(encoder, dtype) if config.objective.target == "momentum" else OnlineBranch(encoder)


class WithPredictor(nn.Module):
    """An encoder and its predictor as one module, whose parameters one engine trains and a checkpoint holds.

    It passes views through the encoder; predictions are made by the objective, which has the same predictor.
    """

    def __init__(self, encoder: Encoder, predictor: Predictor):
        super().__init__()
        # The encoder's parts under the names that they have without a predictor.
        self.backbone, self.projector, self.predictor = encoder.backbone, encoder.projector, predictor
        self._encode = encoder.forward

    def forward(self, views: Sequence[Tensor]) -> list[Tensor]:
        """As the encoder's."""
        return self._encode(views)


def build_predictor(config: Config, device: torch.device) -> Predictor | None:
    """The trained predictor of a method that has one, a function of the seed; None for the other methods."""
    if not config.objective.takes("predictor_hidden"):
        return None
    width = config.model.projector.width
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        predictor = Predictor(width, config.objective.predictor_hidden or max(1, width // 4))
    return predictor.to(device).train()
