"""The negative gradients of the table, computed from samples that are gathered on every rank.

Shape suffixes: V views, N images of this rank, K samples, C embedding width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from unigrad_fast.objectives.bank import Bank
from unigrad_fast.objectives.forms.normalised import Normalised
from unigrad_fast.objectives.forms.rows import Row
from unigrad_fast.objectives.layout import positives
from unigrad_fast.objectives.over_ranks import Gathered
from unigrad_fast.objectives.weighted_sums import Own, similarity_sum, softmax_of_samples, softmax_sum


@dataclass
class Negative:
    """The negative gradient, and other values that the row computes from its samples.

    Attributes:
        gradient: [V, N, C].
        log_VN: log Σ exp(u·v/τ), for a softmax.
        diagonal: [V, 1, C], diag(W) = Σ u·m⁺/N, for positive "diagonal".
        centred: ũ [V, N, C], for a centred row.
        variance: [V, 1, C], unbiased (divided by N−1) over the images of all ranks, for a centred row.
    """

    gradient: Tensor
    log_VN: Tensor | None = None
    diagonal: Tensor | None = None
    centred: Tensor | None = None
    variance: Tensor | None = None


def softmax_of_bank(row: Row, batch: Normalised, positive_VNC: Tensor, bank: Bank) -> Negative:
    """Softmax over the positive and the bank; with the positive among the samples this is InfoNCE's gradient."""
    query_MC = batch.online.flatten(0, 1)
    keys = bank.ready(batch.online)
    bias_K = keys.bias(batch.exact)
    sum_MC, log_M = softmax_sum(
        query_MC, keys.keys, row.temperature, bias_K=bias_K, positive_NC=positive_VNC.flatten(0, 1)
    )
    return Negative(sum_MC.view_as(positive_VNC), log_M.view(positive_VNC.shape[:2]))


def softmax_of_batch(
    row: Row, batch: Normalised, samples_2KC: Tensor, gather: Callable[[Tensor], Gathered]
) -> Negative:
    """Softmax over both global views on all ranks."""
    is_image, exact = batch.gathered.is_image, batch.exact
    sample_KC = samples_2KC.flatten(0, 1)
    bias_K = None if is_image is None else torch.where(is_image, 0.0, -torch.inf).to(exact).repeat(2)
    query_MC, images = batch.online.flatten(0, 1), batch.online.shape[1]
    own: list[Own] = []
    if row.samples == "batch_without_self":
        first = batch.gathered.own.start
        own = [(slice(images), first), (slice(images, 2 * images), samples_2KC.shape[1] + first)]
    sum_MC, log_M = softmax_sum(query_MC, sample_KC, row.temperature, bias_K=bias_K, own=own)
    if row.both_terms:
        log_K = gather(log_M.view(len(batch.online), images, 1)).rows.flatten()
        if is_image is not None:
            log_K = torch.where(is_image.repeat(2), log_K, torch.inf)
        sum_MC += softmax_of_samples(query_MC, sample_KC, row.temperature, log_K, own)
    return Negative(sum_MC.view(batch.online.shape), log_M.view(batch.online.shape[:2]))


def cross_batch(row: Row, batch: Normalised) -> Negative:
    """Σ (m⁺·m⁺_v)/N·v: the samples come from the same view, weighted by the similarity of their positives."""
    own_2NC, all_2KC = (batch.target, batch.all_target)
    if row.negative_target == "stop_gradient":
        own_2NC, all_2KC = batch.online[:2], batch.all_online[:2]
    own_VNC, all_VKC = (positives(towards, len(batch.online), None) for towards in (own_2NC, all_2KC))
    count = batch.gathered.count.clamp_min(1)
    sums = [similarity_sum(*views) for views in zip(own_VNC, all_VKC, batch.all_online, strict=True)]
    diagonal_V1C = None
    if row.positive == "diagonal":
        towards_VKC = positives(batch.all_target, len(batch.online), None)
        diagonal_V1C = (batch.all_online * towards_VKC).sum(1, keepdim=True, dtype=batch.exact) / count
    return Negative(torch.stack(sums).div_(count), diagonal=diagonal_V1C)


def own_batch(row: Row, batch: Normalised) -> Negative:
    """Σ (u·v)/N·v; for a centred row with the mean subtracted from u and v."""
    own_VNC, all_VKC = batch.online, batch.all_online
    centred_VNC = variance_V1C = None
    count = batch.gathered.count.clamp_min(2 if row.centred else 1)
    if row.centred:
        mean_V1C = all_VKC.sum(1, keepdim=True) / count
        own_VNC = centred_VNC = own_VNC - mean_V1C
        all_VKC = all_VKC - mean_V1C
        if batch.gathered.is_image is not None:
            all_VKC = all_VKC * batch.gathered.is_image[:, None]
        variance_V1C = all_VKC.square().sum(1, keepdim=True) / (count - 1)
    sums = [similarity_sum(own, samples, samples) for own, samples in zip(own_VNC, all_VKC, strict=True)]
    return Negative(torch.stack(sums).div_(count), centred=centred_VNC, variance=variance_V1C)
