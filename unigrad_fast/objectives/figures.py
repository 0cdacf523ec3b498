"""The metrics of the paper's figures, "Learning trajectory" and "Justifications for simplifications", from sums.

Every rank sums over its own images. `finished` computes the metrics from the sums over all ranks, so the number of
ranks does not matter. All metrics are of the two global views. `metrics.METRICS` says what each one is.

Shape suffixes: N images of this rank, K images of all ranks, C embedding width.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from unigrad_fast.objectives.predictor import EPSILON
from unigrad_fast.objectives.weighted_sums import Own, softmax_log, softmax_of_samples, softmax_sum

Sums: TypeAlias = "dict[str, Tensor]"  # float64

MEANS = ("correlation_term", "root_term", "identity_term", "term_cosine", "dynamic_balance", "neglected_cosine")


def of_spread(unit_2NC: Tensor) -> Sums:
    """For `feature_std`: moments of u per view and channel."""
    images, width = unit_2NC.shape[1:]
    mean_2C = variance_2C = unit_2NC.new_zeros(2, width, dtype=torch.float64)
    if images:
        variance_2C, mean_2C = torch.var_mean(unit_2NC.double(), dim=1, correction=0)
    count = variance_2C.new_full((), images)
    return {
        "ranks": torch.ones_like(count),
        "images": count,
        "online": count * mean_2C,
        "squared_means": count * mean_2C.square(),
        "variances": count * variance_2C,
    }


def of_pairs(unit_2NC: Tensor, target_2NC: Tensor) -> Sums:
    """For `negative_cosine`, the mean of u·m over all pairs of two images and of their views; needs `of_spread` too."""
    exact = torch.promote_types(unit_2NC.dtype, torch.float32)
    target_NC = target_2NC.to(exact).sum(0)
    return {
        "targets": target_NC.sum(0, dtype=torch.float64),
        "own_targets": _total(torch.linalg.vecdot(unit_2NC.to(exact).sum(0), target_NC)),
    }


def of_predictor(
    unit_2NC: Tensor, predicted_2NC: Tensor, positive_2NC: Tensor, matrix_CC: Tensor, lift: Tensor | float
) -> Sums:
    """For the terms of DirectPred's gradient that λ_d scales, and λ_d (the appendix's equation of that gradient).

    W_h = F^½ + e·I, so F·u = (W_h − e·I)²·u. λ_d = u·W_h·m⁺ / ‖W_h·u‖².

    Args:
        predicted_2NC: W_h·u.
        matrix_CC: W_h.
        lift: e = ε·λ_max.
    """
    root_2NC = predicted_2NC - lift * unit_2NC
    correlated_2NC = root_2NC @ matrix_CC - lift * root_2NC
    along_2N = torch.linalg.vecdot(predicted_2NC, positive_2NC)
    square_2N = torch.linalg.vecdot(predicted_2NC, predicted_2NC)
    return {
        "correlation_term": _total(_length(correlated_2NC)),
        "root_term": _total(2 * lift * _length(root_2NC)),
        "identity_term": _total(lift**2 * _length(unit_2NC)),
        "term_cosine": _total(_cosine(correlated_2NC, root_2NC)),
        "dynamic_balance": _total(torch.where(square_2N > 0, along_2N / square_2N, 0.0)),
    }


def of_channels(online_2NC: Tensor, target_2NC: Tensor) -> Sums:
    """For the diagonal of Barlow Twins' W = Σ BN(z₁)·BN(m₂)ᵀ/N, whatever the form's own normalisation is.

    Args:
        online_2NC, target_2NC: embeddings of the global views as the projector outputs them; z₂ is paired with m₁.
    """
    own_2NC, other_2NC = (views.double().nan_to_num(0, 0, 0) for views in (online_2NC, target_2NC.flip(0)))
    factors = (own_2NC, other_2NC, own_2NC * other_2NC, own_2NC.square(), other_2NC.square())
    return {"channels": torch.stack([each.sum(1) for each in factors])}


def of_neglected(neglected_2NC: Tensor, negative_2NC: Tensor) -> Sums:
    """For `neglected_cosine`: VICReg's terms u/λ − B·ũ and Σ (ũ·ṽ)/N·ṽ; their lengths do not matter."""
    return {"neglected_cosine": _total(_cosine(neglected_2NC, negative_2NC))}


def of_shared_samples(sample_2KC: Tensor, own: slice, temperature: float, is_image: Tensor | None) -> Sums:
    """For `second_term_ratio`: lengths of the terms −u₂ + Σ s_v·v and −u₂ + Σ t_v·v of SimCLR's gradient.

    Args:
        sample_2KC: unit embeddings of the online branch on all ranks.
        own: the slice of K that belongs to this rank.
        is_image: bool [K], False for padding; None if there is none.
    """
    exact = torch.promote_types(sample_2KC.dtype, torch.float32)
    sample_KC, images = sample_2KC.flatten(0, 1), own.stop - own.start
    query_2NC = sample_2KC[:, own]
    query_NC, positive_NC = query_2NC.flatten(0, 1), query_2NC.flip(0).flatten(0, 1).to(exact)
    bias_K = None if is_image is None else torch.where(is_image, 0.0, -torch.inf).to(exact).repeat(2)
    selves: list[Own] = [(slice(images), own.start), (slice(images, None), sample_2KC.shape[1] + own.start)]
    log_K = softmax_log(sample_KC, sample_KC, temperature, bias_K=bias_K, own=[(slice(None), 0)])
    if is_image is not None:
        log_K = torch.where(is_image.repeat(2), log_K, torch.inf)
    first_NC, _ = softmax_sum(query_NC, sample_KC, temperature, bias_K=bias_K, own=selves)
    second_NC = softmax_of_samples(query_NC, sample_KC, temperature, log_K, selves)
    terms = {"first_terms": first_NC, "second_terms": second_NC}
    return {name: _total(_length(sum_NC - positive_NC)) for name, sum_NC in terms.items()}


def over_ranks(sums: Sums, group: dist.ProcessGroup | None) -> Sums:
    """The sums over all ranks, in one collective."""
    flat = torch.cat([each.flatten() for each in sums.values()])
    dist.all_reduce(flat, group=group)
    parts = flat.split([each.numel() for each in sums.values()])
    return {name: part.view(each.shape) for (name, each), part in zip(sums.items(), parts, strict=True)}


def finished(sums: Sums) -> dict[str, Tensor]:
    """The metrics, float64 scalars."""
    count = sums["images"].clamp_min(1)
    mean_2C = sums["online"] / count
    # In float64 the difference is accurate to 1e-8 of the mean; with one rank it is 0.
    between_2C = (sums["squared_means"] / count - mean_2C.square()).clamp_min(0)
    variance_2C = sums["variances"] / count + torch.where(sums["ranks"] > 1, between_2C, 0.0)
    metrics = {"feature_std": variance_2C.sqrt().mean() * mean_2C.shape[1] ** 0.5}
    if "targets" in sums:
        every = torch.dot(sums["online"].sum(0), sums["targets"])
        metrics["negative_cosine"] = (every - sums["own_targets"]) / (4 * count * (count - 1)).clamp_min(1)
    if "channels" in sums:
        own_2C, other_2C, product_2C, *squares = sums["channels"] / count
        variances = [square - mean.square() for square, mean in zip(squares, (own_2C, other_2C), strict=True)]
        deviations = [(variance.clamp_min(0) + EPSILON).sqrt() for variance in variances]
        diagonal_2C = (product_2C - own_2C * other_2C) / (deviations[0] * deviations[1])
        metrics |= {"least_diagonal": diagonal_2C.amin(), "greatest_diagonal": diagonal_2C.amax()}
    if "first_terms" in sums:
        metrics["second_term_ratio"] = sums["second_terms"] / sums["first_terms"]
    return metrics | {name: sums[name] / (2 * count) for name in MEANS if name in sums}


def _total(values: Tensor) -> Tensor:
    return values.sum(dtype=torch.float64)


def _length(rows: Tensor) -> Tensor:
    return torch.linalg.vector_norm(rows, dim=-1)


def _cosine(left: Tensor, right: Tensor) -> Tensor:
    """0 where either row is 0."""
    lengths = _length(left) * _length(right)
    return torch.where(lengths > 0, torch.linalg.vecdot(left, right) / lengths, 0.0)
