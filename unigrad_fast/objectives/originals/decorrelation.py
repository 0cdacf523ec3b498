"""Barlow Twins and VICReg (the paper, section "Feature Decorrelation Methods").

Shape suffixes: V views, N images of this rank, C embedding width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unigrad_fast.objectives import figures
from unigrad_fast.objectives.originals.original import OriginalLoss, Views, mean
from unigrad_fast.objectives.predictor import standardised


class BarlowTwins(OriginalLoss, method="barlow_twins"):
    """Barlow Twins: L = Σ (W_ii − 1)² + λ·Σ_{j≠i} W_ij², W = uᵀm⁺/N from batch-normalised embeddings of all ranks.

    Barlow Twins itself shares weights between the branches.

    Attributes:
        balance: λ.
    """

    balance: float

    def loss_of(self, views: Views) -> Tensor:
        online_VNC, *_, images = standardised(views.online, self.over_ranks, self.process_group)
        target_2NC = standardised(views.target, self.over_ranks, self.process_group)[0]
        if self.measures:
            with torch.no_grad():
                views.sums |= figures.of_channels(views.online[:2], views.target)
        losses = []
        for own_NC, positive_NC in zip(online_VNC, views.positives(target_2NC), strict=True):
            own_NC = own_NC / images  # cheaper than dividing W
            cross_CC = self.summed(own_NC.T @ positive_NC)
            diagonal_C = self.summed((own_NC * positive_NC).sum(0))
            off_diagonal = _squares(cross_CC) - diagonal_C.square().sum()
            losses.append((diagonal_C - 1).square().sum() + self.balance * off_diagonal)
        return torch.stack(losses).mean()


class VICReg(OriginalLoss, method="vicreg"):
    """VICReg, with its authors' weights: the mean over views of

        invariance·mean (z − m⁺)²  +  variance·mean_c max(0, γ − √(var_c + ε))  +  covariance·2/C·Σ_{j≠i} cov_ij²

    with each view's variances and covariances over all ranks. For two views this equals VICReg's sum. It is the paper's
    loss times invariance/C, with λ₁ = 2·C·covariance/invariance and λ₂ = C·variance/invariance.

    VICReg itself shares weights between the branches.

    Attributes:
        invariance, variance, covariance: weights of the terms.
        floor: γ.
        variance_epsilon: ε.
    """

    invariance: float
    variance: float
    covariance: float
    floor: float
    variance_epsilon: float

    def loss_of(self, views: Views) -> Tensor:
        invariance = mean((views.online - views.positives(views.target)).square().mean(-1))
        images = views.online.new_full((1,), views.online.shape[1])
        images = self.summed(images).clamp_min(2)
        centred_VNC = views.online - (self.summed(views.online.sum(1)) / images).unsqueeze(1)
        losses, terms = [], []
        for view, own_NC in enumerate(centred_VNC):
            own_NC = own_NC * (images - 1).rsqrt()
            covariance_CC = self.summed(own_NC.T @ own_NC)
            variance_C = self.summed(own_NC.square().sum(0))
            off_diagonal = _squares(covariance_CC) - variance_C.square().sum()
            hinge = torch.relu(self.floor - (variance_C + self.variance_epsilon).sqrt()).mean()
            losses.append(self.variance * hinge + 2 * self.covariance / self.width * off_diagonal)
            if self.measures and view < 2:
                with torch.no_grad():
                    diagonal_C = images / (images - 1) * self._diagonal(variance_C)
                    neglected_NC = self.invariance * views.online[view] - diagonal_C * centred_VNC[view]
                    terms.append((neglected_NC, own_NC @ covariance_CC))
        if terms:
            views.sums |= figures.of_neglected(*map(torch.stack, zip(*terms, strict=True)))
        return self.invariance * invariance + torch.stack(losses).mean()

    def _diagonal(self, variance_C: Tensor) -> Tensor:
        """The paper's λ·B times invariance·(N−1)/N; with the weights as in the class's docstring."""
        deviation_C = (variance_C + self.variance_epsilon).sqrt()
        hinge_C = torch.where(deviation_C < self.floor, self.variance / (2 * deviation_C), 0.0)
        return 4 * self.covariance * variance_C + hinge_C


def _squares(matrix_CC: Tensor) -> Tensor:
    """The sum of squares; as a norm it takes one pass, and one in backward."""
    return torch.linalg.vector_norm(matrix_CC).square()
