"""UniGrad's formulas over whole tensors, in float64 or as plain torch has them at a lower precision."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Step(NamedTuple):
    """F after one update from 0, and what one step gives with it."""

    correlation: Tensor
    gradient: Tensor
    objective: Tensor
    cosine: Tensor
    negative: Tensor


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def unit(embedding: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """z / max(‖z‖, 1e-12) in at least fp32, rounded to `dtype`; rows that are not finite are 0."""
    exact = embedding.to(torch.promote_types(dtype, torch.float32))
    normalised = torch.nn.functional.normalize(exact, dim=-1)
    return torch.where(exact.isfinite().all(-1, keepdim=True), normalised, 0.0).to(dtype)


def positives(units: Tensor, first: Tensor | None, second: Tensor | None, ratio: Tensor | None) -> Tensor:
    positive = units if first is None else units[first]
    if second is None:
        return positive
    share = ratio.to(units.dtype).unsqueeze(-1)
    return share * positive + (1 - share) * units[second]


def gradient(embedding, positive, correlation, balance, scale, units=None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dz, and L, cosine and negative term summed over rows times scale, in the dtype of F."""
    units = unit(embedding, correlation.dtype) if units is None else units
    norm = torch.linalg.vector_norm(embedding.to(correlation.dtype), dim=-1, keepdim=True).clamp_min(1e-12)
    product = units @ correlation
    step = -positive + balance * product
    along = (units * step).sum(-1, keepdim=True)
    cosine, negative = (units * positive).sum() * scale, (units * product).sum() * scale
    return (step - units * along) / norm * scale, balance / 2 * negative - cosine, cosine, negative


def one_step(online, target, pairs, balance: float, dtype: torch.dtype = torch.float64) -> Step:
    """The first step in training from embeddings [M, C] and [K, C].

    Unit embeddings and operands of the product are rounded to `dtype`; all else is fp32, or float64 for float64.
    """
    exact = torch.promote_types(dtype, torch.float32)
    units, targets = unit(online, dtype).to(exact), unit(target, dtype).to(exact)
    correlation = targets.T @ targets / len(targets)
    operand = correlation.to(dtype).to(exact)
    terms = gradient(online, positives(targets, *pairs), operand, balance, 1 / len(online), units)
    return Step(correlation, terms[0].to(dtype), *terms[1:])


def error(value: Tensor, expected: Tensor) -> float:
    """‖value − expected‖ / ‖expected‖."""
    value, expected = value.double(), expected.double()
    return (torch.linalg.vector_norm(value - expected) / torch.linalg.vector_norm(expected)).item()
