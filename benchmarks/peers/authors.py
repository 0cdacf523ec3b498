"""The objective as the authors' code formulates it: whole-matrix expressions in plain torch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def authors_loss(
    online: list[Tensor], target: list[Tensor], correlation: Tensor | None, balance: float, decay: float
) -> tuple[Tensor, Tensor]:
    """u·g, whose gradient with respect to u is g = −m⁺ + λ·u·F (the paper, section "UniGrad"), and the new F.

    Args:
        online, target: the two views' embeddings [N, C]; no gradient flows into the targets.
        correlation: F, [C, C], from the previous step; None before the first.
        balance: λ.
        decay: ρ.
    """
    u1, u2 = (F.normalize(z, dim=-1) for z in online)
    m1, m2 = (F.normalize(z.detach(), dim=-1) for z in target)
    batch = (m1.T @ m1 + m2.T @ m2) / (2 * len(m1))
    correlation = batch.float() if correlation is None else decay * correlation + (1 - decay) * batch
    gradient1 = (-m2 + balance * u1 @ correlation).detach()
    gradient2 = (-m1 + balance * u2 @ correlation).detach()
    loss = ((u1 * gradient1).sum(-1).mean() + (u2 * gradient2).sum(-1).mean()) / 2
    return loss, correlation
