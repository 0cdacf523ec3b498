"""Every method in straightforward torch: whole-matrix expressions, view by view, and autograd.

Each is called with the online and target embeddings of two views, [N, C] each, and returns the mean loss over views.
The classes for rows compute the losses that `unigrad_fast.objectives.forms.reported` defines for them.

Shape suffixes: N images, K samples, C embedding width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unigrad_fast.benchmarks.peers.authors import authors_loss

DECAY, TEMPERATURE = 0.99, 0.2

Views = Sequence[Tensor]


class Plain(nn.Module):
    """The mean over both views of `loss_of`, applied to a view and its positive, both normalised."""

    normalise: Callable[[Tensor], Tensor] = staticmethod(partial(F.normalize, dim=-1))

    def __init__(self, width: int):
        super().__init__()
        self.width = width

    def forward(self, online: Views, target: Views) -> Tensor:
        first, second = (self.normalise(z) for z in online)
        first_target, second_target = (self.normalise(z.detach()) for z in target)
        loss = (self.loss_of(first, second_target) + self.loss_of(second, first_target)) / 2
        self.take_(first_target, second_target)
        return loss

    def loss_of(self, unit_NC: Tensor, positive_NC: Tensor) -> Tensor:
        raise NotImplementedError

    def take_(self, *target: Tensor) -> None:
        """Update the state that is kept between steps."""


class MoCo(Plain):
    """Like MoCo's code, which clones the bank because it is updated before backward reads it."""

    def __init__(self, width: int, bank: int):
        super().__init__(width)
        self.pointer = 0
        self.register_buffer("queue", torch.zeros(bank, width))

    def forward(self, online: Views, target: Views) -> Tensor:
        self.keys = self.queue.clone()  # once for both views
        return super().forward(online, target)

    def loss_of(self, unit_NC: Tensor, positive_NC: Tensor) -> Tensor:
        positive_N1 = (unit_NC * positive_NC).sum(-1, keepdim=True)
        logit_NK = torch.cat([positive_N1, unit_NC @ self.keys.T], dim=-1) / TEMPERATURE
        return F.cross_entropy(logit_NK, torch.zeros(len(unit_NC), dtype=torch.long, device=unit_NC.device))

    @torch.no_grad()
    def take_(self, *target: Tensor) -> None:
        del self.keys
        for keys_NC in target:
            place_N = (self.pointer + torch.arange(len(keys_NC), device=keys_NC.device)) % len(self.queue)
            self.queue[place_N] = keys_NC
            self.pointer = (self.pointer + len(keys_NC)) % len(self.queue)


class SimCLR(Plain):
    """InfoNCE over the targets of both views, excluding the row's own."""

    def forward(self, online: Views, target: Views) -> Tensor:
        sample_KC = torch.cat([self.normalise(z.detach()) for z in target])
        image_N = torch.arange(len(online[0]), device=sample_KC.device)
        losses = []
        for view, z in enumerate(online):
            logit_NK = self.normalise(z) @ sample_KC.T / TEMPERATURE
            own_NK = torch.zeros_like(logit_NK, dtype=torch.bool)
            own_NK[image_N, image_N + view * len(image_N)] = True
            logit_NK = logit_NK.masked_fill(own_NK, -torch.inf)
            losses.append(F.cross_entropy(logit_NK, image_N + (1 - view) * len(image_N)))
        return sum(losses) / 2


class BYOL(Plain):
    """BYOL and SimSiam, with their predictor as a sequence of torch's layers."""

    def __init__(self, width: int):
        super().__init__(width)
        hidden = max(1, width // 4)
        self.predictor = nn.Sequential(
            nn.Linear(width, hidden, bias=False), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, width)
        )

    def forward(self, online: Views, target: Views) -> Tensor:
        return super().forward([self.predictor(z) for z in online], target)

    def loss_of(self, unit_NC: Tensor, positive_NC: Tensor) -> Tensor:
        return -(unit_NC * positive_NC).sum(-1).mean()


class DirectPred(Plain):
    """DirectPred with a fixed W_h; F is updated nevertheless."""

    def __init__(self, width: int):
        super().__init__(width)
        self.register_buffer("matrix", torch.zeros(width, width))
        self.register_buffer("correlation", torch.zeros(width, width))

    def loss_of(self, unit_NC: Tensor, positive_NC: Tensor) -> Tensor:
        return -F.cosine_similarity(unit_NC @ self.matrix, positive_NC, dim=-1).mean()

    @torch.no_grad()
    def take_(self, *target: Tensor) -> None:
        first, second = target
        batch_CC = (first.T @ first + second.T @ second) / (2 * len(first))
        self.correlation.lerp_(batch_CC, 1 - DECAY)


class UniGrad(nn.Module):
    """The authors' code."""

    def __init__(self, width: int):
        super().__init__()
        self.correlation = None

    def forward(self, online: Views, target: Views) -> Tensor:
        loss, self.correlation = authors_loss([*online], [*target], self.correlation, 100.0, DECAY)
        return loss


class BarlowTwins(Plain):
    """Σ (W_ii − 1)² + λ·Σ_{j≠i} W_ij²."""

    normalise = staticmethod(partial(F.batch_norm, running_mean=None, running_var=None, training=True))
    balance = 5e-3

    def loss_of(self, unit_NC: Tensor, positive_NC: Tensor) -> Tensor:
        cross_CC = unit_NC.T @ positive_NC / len(unit_NC)
        diagonal_C = cross_CC.diagonal()
        off_diagonal = cross_CC.square().sum() - diagonal_C.square().sum()
        return (diagonal_C - 1).square().sum() + self.balance * off_diagonal


class CrossBatch(BarlowTwins):
    """Rows (g) and (h): −2·u·m⁺ + λ·‖W‖²."""

    def loss_of(self, unit_NC: Tensor, positive_NC: Tensor) -> Tensor:
        cross_CC = unit_NC.T @ positive_NC / len(unit_NC)
        return self.balance * cross_CC.square().sum() - 2 * (unit_NC * positive_NC).sum(-1).mean()


class UnitCrossBatch(CrossBatch):
    normalise = Plain.normalise
    balance = 50.0


class VICReg(Plain):
    """VICReg with its authors' loss."""

    normalise = staticmethod(lambda z_NC: z_NC)
    invariance, variance, covariance = 25.0, 25.0, 1.0

    def loss_of(self, unit_NC: Tensor, positive_NC: Tensor) -> Tensor:
        centred_NC = unit_NC - unit_NC.mean(0)
        covariance_CC = centred_NC.T @ centred_NC / (len(unit_NC) - 1)
        off_diagonal = covariance_CC.square().sum() - covariance_CC.diagonal().square().sum()
        hinge = F.relu(1 - (centred_NC.var(0) + 1e-4).sqrt()).mean()
        return (
            self.invariance * F.mse_loss(unit_NC, positive_NC)
            + self.variance * hinge
            + 2 * self.covariance / self.width * off_diagonal
        )


class OwnBatch(Plain):
    """Row (j): −2·u·m⁺ + λ/2·‖uᵀu/N‖²."""

    balance = 25.0

    def loss_of(self, unit_NC: Tensor, positive_NC: Tensor) -> Tensor:
        own_CC = unit_NC.T @ unit_NC / len(unit_NC)
        return self.balance / 2 * own_CC.square().sum() - 2 * (unit_NC * positive_NC).sum(-1).mean()


# Constructors, which take the width and, for moco, the size of the bank.
PLAIN: Mapping[str, Callable[..., nn.Module]] = {
    "moco": MoCo,
    "simclr": SimCLR,
    "byol": BYOL,
    "byol_directpred": DirectPred,
    "unigrad": UniGrad,
    "barlow_twins": BarlowTwins,
    "row g": CrossBatch,
    "row h": UnitCrossBatch,
    "vicreg": VICReg,
    "row j": OwnBatch,
}
