"""The loss reported for a row: the loss whose derivative with respect to u is the row's gradient, or approximates it.

    softmax          scale · mean( −u·positive + λ·τ·log Σ exp(u·v/τ) )                      exact
    moving_average   scale · mean( −u·positive + λ/2·u·F·u )                                 exact, F constant
    with W_h         mean( scale·( −u·W_h·m⁺ + λ/2·u·G·u ) )                                 scale and W_h constant
                     row (d), with a dynamic λ: mean( −cos(W_h·u, m⁺) )                      the loss it simplifies
    cross_batch      scale · mean( −u·positive + λ/2·u·negative )                            exact, m constant
    with A           Σ (W_ii − 1)² + λ·Σ_{j≠i} W_ij²                                         exact: Barlow Twins
    own_batch        scale · mean( −u·positive + λ/4·u·negative )                            exact
    centred          VICReg in the paper's form, λ₁ = λ·C·(N−1)²/(2·N²)                      exact

Means are over this rank's images, W and variances over all ranks' images. Shape suffixes: V views, N images, C width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unigrad_fast.objectives.forms.negatives import Negative
from unigrad_fast.objectives.forms.normalised import Normalised
from unigrad_fast.objectives.forms.rows import Row

DEGREE = {"moving_average": 2, "cross_batch": 2, "own_batch": 4}  # of the loss's negative term in u


def constant_scale(row: Row) -> float:
    """The row's scale if it is the same for all images; 1 if it is not."""
    return {"temperature": 1 / row.temperature, "two": 2.0, "one": 1.0, "predictor": 1.0}[row.scale]


def of_means(row: Row, along: Tensor, product: Tensor, negative: Negative) -> Tensor:
    """The loss from the means of u·positive and u·negative."""
    if negative.log_VN is not None:
        log = negative.log_VN.sum() / max(1, negative.log_VN.numel())
        return constant_scale(row) * (row.weight * row.temperature * log - along)
    return constant_scale(row) * (row.weight / DEGREE[row.negative] * product - along)


def of_rows(
    row: Row,
    batch: Normalised,
    positive_VNC: Tensor,
    along_VN1: Tensor,
    product_VN1: Tensor,
    scale: Tensor | float,
    negative: Negative,
) -> Tensor:
    """The loss for rows with a scale per image, or with extra terms."""
    rows = max(1, along_VN1.numel())
    product = product_VN1.sum() / rows
    if row.positive == "predictor":  # with a dynamic λ the weight is 0
        return (scale * (row.weight / 2 * product_VN1 - along_VN1)).sum() / rows
    if negative.diagonal is not None:
        diagonal_VC = negative.diagonal.squeeze(1)
        pulled = (diagonal_VC - 1).square().sum(-1).mean() - row.weight * diagonal_VC.square().sum(-1).mean()
        return scale / 2 * (pulled + row.weight * product)
    if negative.variance is not None:
        variance_VC, width = negative.variance.squeeze(1), batch.online.shape[-1]
        distance = (batch.online - positive_VNC).square().sum() / rows
        distance += 2 * (1 / row.positive_factor - 1) * along_VN1.sum() / rows  # ‖u‖² − 2·f·u·m⁺ + ‖m⁺‖²
        squares = variance_VC.square().sum(-1).mean()
        off_diagonal = row.weight / 2 * product - covariance_weight(row, batch) / width * squares
        hinge = torch.relu(row.floor - (variance_VC + row.variance_epsilon).sqrt()).mean()
        return scale / 2 * (distance + off_diagonal + row.variance * hinge)
    return of_means(row, along_VN1.sum() / rows, product, negative)


def covariance_weight(row: Row, batch: Normalised) -> Tensor:
    """The paper's λ₁ = λ·C·(N−1)²/(2·N²)."""
    count = batch.gathered.count.clamp_min(2)
    return row.weight * batch.online.shape[-1] * (count - 1).square() / (2 * count.square())


def variance_term(row: Row, batch: Normalised, centred_VNC: Tensor, variance_V1C: Tensor) -> Tensor:
    """B·ũ in the paper's gradient of VICReg, B = N/(λ·C·(N−1)) · (2·λ₁·diag(W′) + λ₂/2·[std < γ]/std)."""
    count, width = batch.gathered.count.clamp_min(2), batch.online.shape[-1]
    deviation_V1C = (variance_V1C + row.variance_epsilon).sqrt()
    hinge_V1C = torch.where(deviation_V1C < row.floor, 1 / deviation_V1C, 0.0)
    diagonal_V1C = 2 * covariance_weight(row, batch) * variance_V1C + row.variance / 2 * hinge_V1C
    return centred_VNC * diagonal_V1C * (count / (row.weight * width * (count - 1)))
