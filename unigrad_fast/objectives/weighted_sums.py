"""Sums over samples weighted by their similarity to a row, without ever storing the full rows × samples matrix.

Shape suffixes: N rows, K samples, C embedding width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

Own: TypeAlias = "tuple[slice, int]"

CHUNK = 1 << 22  # similarities held at once
LEAST = 256  # smallest chunk of samples: matrix products with fewer are slow


def product(left_NK: Tensor, right_KC: Tensor) -> Tensor:
    """left · right, summed and returned in at least fp32, whatever the operands' dtypes."""
    exact = torch.promote_types(left_NK.dtype, torch.float32)
    if left_NK.dtype == exact:
        return left_NK @ right_KC.to(exact)
    if left_NK.is_cuda:
        return torch.mm(left_NK, right_KC, out_dtype=exact)
    return left_NK.to(exact) @ right_KC.to(exact)


def softmax_sum(
    query_NC: Tensor,
    key_KC: Tensor,
    temperature: float,
    *,
    bias_K: Tensor | None = None,
    positive_NC: Tensor | None = None,
    own: Sequence[Own] = (),
) -> tuple[Tensor, Tensor]:
    """Σ s_v·v over the samples with s = softmax(u·v/τ), by an online softmax over chunks of samples.

    Args:
        query_NC: u.
        key_KC: v.
        temperature: τ.
        bias_K: 0 for a sample, −∞ for an entry to ignore.
        positive_NC: one extra sample per row.
        own: slices of rows that are samples too, each with the index of the first row's sample; a row ignores itself.

    Returns:
        The sums [N, C] and log Σ exp(u·v/τ) [N], in at least fp32; 0 if there are no samples.
    """
    exact = torch.promote_types(query_NC.dtype, torch.float32)
    rows = query_NC.shape[0]
    if positive_NC is None and 0 < key_KC.shape[0] <= _step(rows):
        return _softmax_sum_at_once(query_NC, key_KC, temperature, bias_K, own)
    if positive_NC is None:
        sum_NC = query_NC.new_zeros(query_NC.shape, dtype=exact)
        most_N1 = query_NC.new_full((rows, 1), torch.finfo(exact).min, dtype=exact)
        mass_N1 = torch.zeros_like(most_N1)
    else:
        sum_NC = positive_NC.to(exact, copy=True)
        most_N1 = (query_NC.to(exact) * sum_NC).sum(-1, keepdim=True) / temperature
        mass_N1 = torch.ones_like(most_N1)
    for chunk, weight_NK in _similarities(query_NC, key_KC, temperature, bias_K):
        _leave_out_(weight_NK, own, chunk.start)
        larger_N1 = torch.maximum(most_N1, weight_NK.amax(-1, keepdim=True))
        shrink_N1 = (most_N1 - larger_N1).exp_()
        weight_NK.sub_(larger_N1).exp_()
        mass_N1.mul_(shrink_N1).add_(weight_NK.sum(-1, keepdim=True))
        most_N1 = larger_N1
        _add_product_(sum_NC.mul_(shrink_N1), weight_NK, key_KC[chunk])
    has_N1 = mass_N1 > 0
    mass_N1 = torch.where(has_N1, mass_N1, 1.0)
    log_N1 = torch.where(has_N1, most_N1 + mass_N1.log(), 0.0)
    return sum_NC.div_(mass_N1), log_N1.squeeze(-1)


def _softmax_sum_at_once(
    query_NC: Tensor, key_KC: Tensor, temperature: float, bias_K: Tensor | None, own: Sequence[Own]
) -> tuple[Tensor, Tensor]:
    """`softmax_sum` for samples that fit into one chunk: the weights are normalised before the product."""
    ((_, weight_NK),) = _similarities(query_NC, key_KC, temperature, bias_K)
    _leave_out_(weight_NK, own, 0)
    log_N1 = weight_NK.logsumexp(-1, keepdim=True)
    log_N1 = torch.where(log_N1 > -torch.inf, log_N1, 0.0)  # without samples every weight is exp(−∞)
    return product(weight_NK.sub_(log_N1).exp_().to(key_KC.dtype), key_KC), log_N1.squeeze(-1)


def softmax_log(
    query_NC: Tensor,
    key_KC: Tensor,
    temperature: float,
    *,
    bias_K: Tensor | None = None,
    own: Sequence[Own] = (),
) -> Tensor:
    """log Σ exp(u·v/τ) [N] as `softmax_sum` returns it, without the sums; −∞ if there are no samples."""
    log_N = query_NC.new_full((len(query_NC),), -torch.inf, dtype=torch.promote_types(query_NC.dtype, torch.float32))
    for chunk, weight_NK in _similarities(query_NC, key_KC, temperature, bias_K):
        _leave_out_(weight_NK, own, chunk.start)
        log_N = torch.logaddexp(log_N, weight_NK.logsumexp(-1))
    return log_N


def softmax_of_samples(
    query_NC: Tensor, key_KC: Tensor, temperature: float, log_K: Tensor, own: Sequence[Own] = ()
) -> Tensor:
    """Σ t_v·v with t_v = exp(v·u/τ − log_K[v]), the weight of row u in the softmax of sample v.

    Args:
        query_NC, key_KC, temperature, own: as in `softmax_sum`.
        log_K: each sample's log Σ exp; ∞ for an entry to ignore.
    """
    exact = torch.promote_types(query_NC.dtype, torch.float32)
    sum_NC = query_NC.new_zeros(query_NC.shape, dtype=exact)
    for chunk, weight_NK in _similarities(query_NC, key_KC, temperature, -log_K):
        _leave_out_(weight_NK, own, chunk.start)
        _add_product_(sum_NC, weight_NK.exp_(), key_KC[chunk])
    return sum_NC


def similarity_sum(query_NC: Tensor, key_KC: Tensor, value_KC: Tensor) -> Tensor:
    """Σ (q·k)·v over the samples, [N, C] in at least fp32: (q·kᵀ)·v or q·(kᵀ·v), whichever is cheaper."""
    rows, width = query_NC.shape
    samples = key_KC.shape[0]
    if products_first(rows, samples, width):
        return product(query_NC, product(key_KC.T, value_KC).to(query_NC.dtype))
    sum_NC = query_NC.new_zeros(query_NC.shape, dtype=torch.promote_types(query_NC.dtype, torch.float32))
    for chunk, weight_NK in _similarities(query_NC, key_KC, 1.0, None):
        _add_product_(sum_NC, weight_NK, value_KC[chunk])
    return sum_NC


def products_first(rows: int, samples: int, width: int) -> bool:
    """Whether q·(kᵀ·v), with a matrix [C, C] in between, takes fewer multiplications than (q·kᵀ)·v."""
    return width * (samples + rows) < 2 * rows * samples


def _similarities(
    query_NC: Tensor, key_KC: Tensor, temperature: float, bias_K: Tensor | None
) -> Iterator[tuple[slice, Tensor]]:
    """Yields u·v/τ + bias chunk by chunk; every chunk reuses the same memory."""
    rows, samples = query_NC.shape[0], key_KC.shape[0]
    step = _step(rows)
    exact = torch.promote_types(query_NC.dtype, torch.float32)
    room = query_NC.new_empty(rows * min(step, samples), dtype=exact)
    for first in range(0, samples, step):
        chunk = slice(first, min(first + step, samples))
        weight_NK = room[: rows * (chunk.stop - first)].view(rows, chunk.stop - first)
        if query_NC.dtype == exact:
            bias = weight_NK.new_zeros(1) if bias_K is None else bias_K[chunk]
            torch.addmm(
                bias, query_NC, key_KC[chunk].T, beta=0 if bias_K is None else 1, alpha=1 / temperature, out=weight_NK
            )
        else:
            weight_NK.copy_(product(query_NC, key_KC[chunk].T)).mul_(1 / temperature)
            if bias_K is not None:
                weight_NK.add_(bias_K[chunk])
        yield chunk, weight_NK


def _add_product_(sum_NC: Tensor, weight_NK: Tensor, value_KC: Tensor) -> None:
    if value_KC.dtype == sum_NC.dtype:
        sum_NC.addmm_(weight_NK, value_KC)
    else:
        sum_NC.add_(product(weight_NK.to(value_KC.dtype), value_KC))


def _step(rows: int) -> int:
    """Number of samples per chunk."""
    return max(LEAST, CHUNK // max(1, rows))


def _leave_out_(weight_NK: Tensor, own: Sequence[Own], start: int) -> None:
    """Write −∞ where a row is its own sample, in similarities whose first sample is `start`."""
    for rows, first in own:
        row_NK, offset = weight_NK[rows], first - start
        if -row_NK.shape[0] < offset < row_NK.shape[1]:
            row_NK.diagonal(offset).fill_(-torch.inf)
