"""UniGrad's arithmetic in plain torch: the ground truth, and the path on the CPU.

Shape suffixes: M rows (images times views), C embedding width. With u the unit embedding, m⁺ the positive,
F the correlation, λ the balance factor and ρ the decay (the paper, section "UniGrad"):

    F  ← ρ·F + (1−ρ)/count · Σ mᵀm                        moving average of the correlation
    g  = −m⁺ + λ·u·F                                      gradient with respect to u
    dz = (g − u·(u·g)) / ‖z‖ · scale                      the same through the normalisation

Everything is computed in fp32, or in float64 when the embeddings are float64.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

SMALLEST_NORM = 1e-12  # u = z / max(‖z‖, 1e-12), as torch.nn.functional.normalize has it
PANEL_ROWS = 512  # rows of F per panel: the largest temporary of the update is PANEL_ROWS · C


def unit_embeddings(embedding_MC: Tensor, nonfinite: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """ℓ2-normalise embeddings row by row.

    Args:
        embedding_MC: [M, C], any floating dtype, as the projector gives it.
        nonfinite: int32 scalar on the same device; set to 1 when a row holds a NaN or an infinity.

    Returns:
        The unit embeddings [M, C] and the inverse norms [M], fp32 (float64 for float64). A row of zeros and
        a non-finite row give a zero unit embedding and a zero inverse norm, hence a zero gradient.
    """
    row_MC = embedding_MC.to(torch.promote_types(embedding_MC.dtype, torch.float32))
    peak_M1 = row_MC.abs().amax(dim=-1, keepdim=True) if row_MC.numel() else row_MC.sum(-1, keepdim=True)
    finite_M1 = torch.isfinite(peak_M1)
    usable_M1 = finite_M1 & (peak_M1 > 0)
    # Rows are divided by their largest entry first, so that squares neither overflow nor vanish.
    peak_M1 = torch.where(usable_M1, peak_M1, 1.0)
    row_MC = torch.where(usable_M1, row_MC / peak_M1, 0.0)
    norm_M1 = torch.linalg.vector_norm(row_MC, dim=-1, keepdim=True)
    norm_M1 = torch.maximum(norm_M1, SMALLEST_NORM / peak_M1)
    unit_MC = row_MC / norm_M1
    inverse_norm_M = torch.where(usable_M1, 1.0 / (norm_M1 * peak_M1), 0.0).squeeze(-1)
    if nonfinite is not None:
        torch.maximum(nonfinite, (~finite_M1).any().to(nonfinite.dtype), out=nonfinite)
    return unit_MC, inverse_norm_M


def update_correlation_(
    correlation_CC: Tensor,
    unit_MC: Tensor,
    *,
    decay: Tensor | float,
    count: int,
    skip: Tensor | None = None,
    reduce_: Callable[[Tensor], object] | None = None,
) -> Tensor:
    """Move the correlation towards this batch's, in place: F ← ρ·F + (1−ρ)/count · Σ mᵀm.

    Only the upper triangle is computed, panel by panel, and then mirrored: half the arithmetic, F equal to Fᵀ
    bit for bit, and no temporary larger than one panel.

    Args:
        correlation_CC: [C, C] F, symmetric, in the dtype of `unit_MC`; changed in place.
        unit_MC: [M, C] unit embeddings of this rank.
        decay: ρ as a number or a scalar tensor; 0 makes F this batch's correlation.
        count: rows over all ranks (2·N·W for two global views).
        skip: scalar tensor; where it is not 0, F stays bitwise as it is.
        reduce_: sums a tensor over the ranks in place (None: one process).

    Returns:
        `correlation_CC`.
    """
    width = correlation_CC.shape[0]
    decay = torch.as_tensor(decay, dtype=unit_MC.dtype, device=unit_MC.device)
    weight = (1.0 - decay) / count
    if skip is not None:
        skipped = skip != 0
        decay, weight = torch.where(skipped, 1.0, decay), torch.where(skipped, 0.0, weight)
        unit_MC = torch.where(skipped, 0.0, unit_MC)
    for first in range(0, width, PANEL_ROWS):
        last = min(first + PANEL_ROWS, width)
        panel = correlation_CC[first:last, first:].mul_(decay)
        weighted_MP = unit_MC[:, first:last] * weight
        if reduce_ is None:
            panel.addmm_(weighted_MP.T, unit_MC[:, first:])
        else:
            product = weighted_MP.T @ unit_MC[:, first:]
            reduce_(product)
            panel.add_(product)
        diagonal = panel[:, : last - first]
        diagonal.copy_(diagonal.triu() + diagonal.triu(1).T)
        correlation_CC[last:, first:last].copy_(panel[:, last - first :].T)
    return correlation_CC


def unigrad_gradient(
    unit_MC: Tensor,
    inverse_norm_M: Tensor,
    positive_MC: Tensor,
    correlation_CC: Tensor,
    *,
    balance: float,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """UniGrad's gradient with respect to the embeddings, and the two terms of the objective.

    Args:
        unit_MC: [M, C] unit embeddings of the online branch.
        inverse_norm_M: [M] 1/‖z‖, as `unit_embeddings` returns it.
        positive_MC: [M, C] m⁺, the target (or the mean of several) that each row is pulled to.
        correlation_CC: [C, C] F, a constant here.
        balance: λ.
        scale: weight of one row in the loss, 1/(N·V).

    Returns:
        dz [M, C], the positive cosines u·m⁺ [M] and the negative terms u·F·uᵀ [M].
    """
    product_MC = unit_MC @ correlation_CC
    cosine_M = (unit_MC * positive_MC).sum(dim=-1)
    negative_M = (unit_MC * product_MC).sum(dim=-1)
    gradient_MC = product_MC.mul_(balance).sub_(positive_MC)
    along_M = (unit_MC * gradient_MC).sum(dim=-1)
    gradient_MC.addcmul_(unit_MC, along_M.unsqueeze(-1), value=-1.0)
    return gradient_MC.mul_((inverse_norm_M * scale).unsqueeze(-1)), cosine_M, negative_M


def effective_rank(correlation_CC: Tensor) -> Tensor:
    """Participation ratio trace(F)² / ‖F‖²: the number of directions the embeddings use, from 1 to C; a scalar."""
    return (correlation_CC.diagonal().sum() / torch.linalg.vector_norm(correlation_CC)).square()
