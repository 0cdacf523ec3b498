"""InfoNCE: MoCo with its bank, SimCLR within the batch (the paper, section "Contrastive Learning Methods").

    L = mean of −log( exp(cos(u, m⁺)/τ) / Σ_v exp(cos(u, v)/τ) )

Shape suffixes: V views, N images of this rank, M = V·N rows, K samples, C embedding width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from unigrad_fast.objectives import figures
from unigrad_fast.objectives.bank import Bank
from unigrad_fast.objectives.layout import Mix
from unigrad_fast.objectives.originals.original import OriginalLoss, Views, mean


class MoCo(OriginalLoss, method="moco"):
    """MoCo: the samples are the positive and the bank; afterwards this batch's targets are written to the bank.

    Attributes:
        temperature: τ.
        bank: holds bank_size keys; it starts empty.
    """

    temperature: float
    bank_size: int

    def __init__(self, width: int, **settings: Any):
        super().__init__(width, **settings)
        self.bank = Bank(self.bank_size, self.width)

    @property
    def updates(self) -> Tensor:
        return self.bank.updates

    def loss_of(self, views: Views) -> Tensor:
        unit_MC, positive_M = views.unit_online.flatten(0, 1), views.cosine.flatten() / self.temperature
        bank = self.bank.ready(unit_MC)
        # Cloned because the bank is overwritten before backward reads it.
        key_KC = bank.keys.clone()
        # Finite instead of −∞, which has no gradient if the whole bank is empty.
        bias_K = bank.bias(unit_MC.dtype).clamp_min(torch.finfo(unit_MC.dtype).min / 4)
        logit_MK = torch.addmm(bias_K, unit_MC, key_KC.T, alpha=1 / self.temperature)
        loss = mean(torch.logaddexp(positive_M, logit_MK.logsumexp(-1)) - positive_M)
        if self.training:
            batch = self.gather(views.unit_target.detach(), views.raised)
            bank.take_(batch, batch.raised[1])
        return loss


class SimCLR(OriginalLoss, method="simclr"):
    """SimCLR: the samples are the targets of both global views on all ranks, except a view's own.

    SimCLR itself shares weights between the branches.

    Attributes:
        temperature: τ.
    """

    temperature: float

    def loss_of(self, views: Views) -> Tensor:
        samples = self.gather(views.unit_target, views.raised)
        sample_KC = samples.rows.flatten(0, 1)
        unit_VNC, images = views.unit_online, samples.rows.shape[1]
        bias_VNK = unit_VNC.new_zeros(*unit_VNC.shape[:2], len(sample_KC))  # −∞ for entries to ignore
        for view in range(2):
            bias_VNK[view].diagonal(view * images + samples.own.start).fill_(-torch.inf)
        if samples.is_image is not None:
            bias_VNK.masked_fill_(~samples.is_image.repeat(2), -torch.inf)
        logit_MK = torch.addmm(bias_VNK.flatten(0, 1), unit_VNC.flatten(0, 1), sample_KC.T, alpha=1 / self.temperature)
        if self.measures and self.target != "momentum":
            with torch.no_grad():
                shared = (samples.rows, samples.own, self.temperature, samples.is_image)
                views.sums |= figures.of_shared_samples(*shared)
        views.cosine = self._positive(logit_MK.view_as(bias_VNK), images, samples.own.start, views.mix)
        return mean(logit_MK.logsumexp(-1) - views.cosine.flatten() / self.temperature)

    def _positive(self, logit_VNK: Tensor, images: int, first: int, mix: Mix | None) -> Tensor:
        """u·m⁺, [V, N], read from the logits: each positive is one of the samples, or a mean or mixture of two."""
        pulled = []
        for view, logit_NK in enumerate(logit_VNK[:2]):
            start = (1 - view) * images + first
            own_N = logit_NK.diagonal(start)
            if mix is not None:
                other_N = logit_NK.gather(1, (mix.partner[view] + start).unsqueeze(-1)).squeeze(-1)
                own_N = torch.lerp(other_N, own_N, mix.ratio[view].to(own_N.dtype))
            pulled.append(own_N)
        local = [logit_VNK[2:].diagonal(view * images + first, 1, 2) for view in range(2)]
        return torch.cat([torch.stack(pulled), (local[0] + local[1]) / 2]) * self.temperature
