"""Batch norm of several groups of images in one pass, fused with the addition and the ReLU that follow it.

    statistics  n, mean and Σ (x − mean)² per group and channel: x is read once
    settle      the statistics of all ranks merged, running buffers updated: C numbers per rank and group
    normalise   y = relu((x − mean)/σ · γ + β + residual): x and residual are read once, y is written once
    pool        the maximum of relu((x − mean)/σ · γ + β) in windows of 3 × 3 at every second row and column, and where
                it is: x is read once, a quarter of y and a byte for each of its elements are written
    sums        Σ dy' and Σ dy'·x̂ per group and channel: dy and x are read once
    gradient    dx = γ/σ · (dy' − Σdy'/n − x̂·Σ(dy'·x̂)/n): dy and x are read once, dx is written once

with x̂ = (x − mean)/σ, and dy' the part of dy that passes the ReLU. Without a residual that part can be recomputed from
x. With one, a bit per element is saved, and `sums` writes dy', the residual's gradient, from which `gradient` goes on.
A result that is used twice has two gradients: `sums` adds them as it reads them. After `pool`, `sums` and `gradient`
find each position's gradient in the windows that have it.

A tensor is processed as rows of channels, channels-last: each row of an image is one position of its feature map. The
rows of a group are cut into chunks, with one program per chunk and block of channels; `batch_norm_merges` merges their
results. Sums within a chunk are fp32 and relative to the chunk's first row; sums across chunks and ranks are float64.

Shape suffixes: G groups, R ranks, C channels, S = 2C + 1 statistics.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .batch_norm_merges import (
    bunch_of,
    finish_statistics,
    is_last,
    merge_sums,
    store_pair,
    ticket_of,
    tickets_for,
)
from .batch_norm_reference import NOWHERE, WORD, empty_mask, pooled_size
from .heuristics import NORM_KERNELS, blocks, cut


@triton.jit
def place(rows, chunk, C, COLUMNS: tl.constexpr):
    """This program's group and channels, a mask of the channels that exist, and its chunk's first row and end."""
    o_C = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.program_id(0) * chunk
    return tl.program_id(1).to(tl.int64), o_C, o_C < C, first, tl.minimum(first + chunk, rows)


@triton.jit
def tile_at(start, last, group, rows, o_C, m_C, C, ROWS: tl.constexpr):
    """For the tile that begins at row `start` of a group: row indices over all groups [ROWS], offsets and a mask of the
    elements that exist, both [ROWS, COLUMNS]."""
    o_R = start + tl.arange(0, ROWS)
    o_row = group * rows + o_R
    return o_row, o_row[:, None] * C + o_C[None, :], (o_R < last)[:, None] & m_C[None, :]


@triton.jit
def per_channel(p, o_C, m_C, otherwise):
    """[COLUMNS] of a parameter in fp32; `otherwise` if there is no parameter."""
    if p is None:
        b = tl.zeros_like(o_C).to(tl.float32) + otherwise
    else:
        b = tl.load(p + o_C, mask=m_C, other=0).to(tl.float32)
    return b


@triton.jit
def factors(p_mean, p_variance, p_weight, p_bias, group, o_C, m_C, C, eps):
    """mean, 1/σ, γ and β for a group's channels, each [COLUMNS]."""
    b_mean = tl.load(p_mean + group * C + o_C, mask=m_C, other=0)
    b_inverse = tl.rsqrt(tl.load(p_variance + group * C + o_C, mask=m_C, other=1) + eps)
    return b_mean, b_inverse, per_channel(p_weight, o_C, m_C, 1.0), per_channel(p_bias, o_C, m_C, 0.0)


@triton.jit
def statistics_kernel(
    p_x,
    p_parts,
    p_statistics,
    p_tickets,
    rows,
    chunk,
    C,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
):
    group, o_C, m_C, first, last = place(rows, chunk, C, COLUMNS)
    p_first = p_x + (group * rows + first) * C
    b_shift = tl.load(p_first + o_C, mask=m_C, other=0).to(tl.float32)  # [COLUMNS]
    b_sum = tl.zeros([ROWS, COLUMNS], tl.float32)
    b_square = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(first, last, ROWS):
        _, o, m = tile_at(start, last, group, rows, o_C, m_C, C, ROWS)
        b_x = tl.load(p_x + o, mask=m, other=0).to(tl.float32)  # [ROWS, COLUMNS]
        b_x = tl.where(m, b_x - b_shift[None, :], 0.0)
        b_sum += b_x
        b_square += b_x * b_x
    count = (last - first).to(tl.float64)
    b_total = tl.sum(b_sum, 0).to(tl.float64)
    b_mean = b_shift.to(tl.float64) + b_total / count
    b_squares = tl.sum(b_square, 0).to(tl.float64) - b_total * b_total / count
    finish_statistics(
        p_parts,
        p_statistics,
        p_tickets,
        b_mean,
        b_squares,
        tl.program_id(0),
        tl.num_programs(0),
        group,
        tl.program_id(2),
        tl.num_programs(2),
        rows,
        chunk,
        o_C,
        m_C,
        C,
        PARTS,
        PARTS,
    )


@triton.jit
def settle_kernel(
    p_parts,
    p_mean,
    p_variance,
    p_count,
    p_running_mean,
    p_running_var,
    p_tracked,
    ranks,
    stride,
    C,
    momentum,
    GROUPS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    o_C = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    m_C = o_C < C
    if p_running_mean is not None:
        b_running_mean = tl.load(p_running_mean + o_C, mask=m_C, other=0)  # [COLUMNS]
        b_running_var = tl.load(p_running_var + o_C, mask=m_C, other=0)  # [COLUMNS]
    for group in range(GROUPS):
        p_group = p_parts + group * (2 * C + 1)
        b_pivot = tl.load(p_group + o_C, mask=m_C, other=0)  # [COLUMNS]
        b_shifted = tl.zeros([COLUMNS], tl.float64)
        b_squares = tl.zeros([COLUMNS], tl.float64)
        b_count = tl.zeros([COLUMNS], tl.float64)
        for rank in range(ranks):
            p = p_group + tl.cast(rank, tl.int64) * stride
            rows = tl.load(p + 2 * C)
            b_difference = tl.load(p + o_C, mask=m_C, other=0) - b_pivot  # [COLUMNS]
            b_count += rows
            b_shifted += rows * b_difference
            b_squares += tl.load(p + C + o_C, mask=m_C, other=0) + rows * b_difference * b_difference  # [COLUMNS]
        b_one = tl.maximum(b_count, 1.0)
        b_mean = b_pivot + b_shifted / b_one
        b_squares = tl.maximum(b_squares - b_shifted * b_shifted / b_one, 0.0, propagate_nan=tl.PropagateNan.ALL)
        tl.store(p_mean + group * C + o_C, b_mean.to(tl.float32), mask=m_C)
        tl.store(p_variance + group * C + o_C, (b_squares / b_one).to(tl.float32), mask=m_C)
        tl.store(p_count + group + 0 * o_C, b_count, mask=o_C == 0)
        if p_running_mean is not None:
            share = momentum
            if momentum is None:  # the mean of all batches so far
                share = 1.0 / (tl.load(p_tracked) + group + 1).to(tl.float32)
            b_unbiased = b_squares / tl.maximum(b_count - 1.0, 1.0)
            b_running_mean = (1.0 - share) * b_running_mean + share * b_mean.to(tl.float32)
            b_running_var = (1.0 - share) * b_running_var + share * b_unbiased.to(tl.float32)
    if p_running_mean is not None:
        tl.store(p_running_mean + o_C, b_running_mean, mask=m_C)
        tl.store(p_running_var + o_C, b_running_var, mask=m_C)
        if momentum is not None and p_tracked is not None and tl.program_id(0) == 0:
            tl.store(p_tracked, tl.load(p_tracked) + GROUPS)


@triton.jit
def normalise_kernel(
    p_x,
    p_mean,
    p_variance,
    p_weight,
    p_bias,
    p_residual,
    p_y,
    p_mask,
    rows,
    chunk,
    C,
    eps,
    RELU: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WORD: tl.constexpr,
):
    group, o_C, m_C, first, last = place(rows, chunk, C, COLUMNS)
    b_mean, b_inverse, b_weight, b_bias = factors(p_mean, p_variance, p_weight, p_bias, group, o_C, m_C, C, eps)
    for start in range(first, last, ROWS):
        o_row, o, m = tile_at(start, last, group, rows, o_C, m_C, C, ROWS)
        b_x = tl.load(p_x + o, mask=m, other=0).to(tl.float32)  # [ROWS, COLUMNS]
        b_y = (b_x - b_mean[None, :]) * b_inverse[None, :] * b_weight[None, :] + b_bias[None, :]
        if p_residual is not None:
            b_y += tl.load(p_residual + o, mask=m, other=0).to(tl.float32)  # [ROWS, COLUMNS]
        if RELU:
            if p_mask is not None:
                o_bit = tl.arange(0, COLUMNS) % WORD
                b_bits = (m & (b_y > 0)).to(tl.int32) << o_bit[None, :]
                b_words = tl.sum(tl.reshape(b_bits, [ROWS, COLUMNS // WORD, WORD]), 2)  # [ROWS, COLUMNS / WORD]
                words = tl.cdiv(C, WORD)
                o_W = tl.program_id(2) * (COLUMNS // WORD) + tl.arange(0, COLUMNS // WORD)
                m_W = (start + tl.arange(0, ROWS) < last)[:, None] & (o_W < words)[None, :]
                tl.store(p_mask + o_row[:, None] * words + o_W[None, :], b_words, mask=m_W)
            b_y = tl.maximum(b_y, 0.0, propagate_nan=tl.PropagateNan.ALL)
        tl.store(p_y + o, b_y.to(p_y.dtype.element_ty), mask=m)


@triton.jit
def pool_kernel(
    p_x,
    p_mean,
    p_variance,
    p_weight,
    p_bias,
    p_y,
    p_choice,
    rows,
    chunk,
    C,
    H,
    W,
    eps,
    NOWHERE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    group, o_C, m_C, first, last = place(rows, chunk, C, COLUMNS)
    b_mean, b_inverse, b_weight, b_bias = factors(p_mean, p_variance, p_weight, p_bias, group, o_C, m_C, C, eps)
    height, width = (H + 1) // 2, (W + 1) // 2  # of y
    for start in range(first, last, ROWS):
        _, o, m = tile_at(start, last, group, rows, o_C, m_C, C, ROWS)
        o_R = start + tl.arange(0, ROWS)
        o_image = group * (rows // (height * width)) + o_R // (height * width)
        o_H, o_W = o_R // width % height * 2 - 1, o_R % width * 2 - 1  # the window's corner
        b_most = tl.full([ROWS, COLUMNS], float("-inf"), tl.float32)
        b_choice = tl.full([ROWS, COLUMNS], NOWHERE, tl.int32)
        for tap in tl.static_range(9):
            o_h, o_w = o_H + tap // 3, o_W + tap % 3
            m_tap = m & ((o_h >= 0) & (o_h < H) & (o_w >= 0) & (o_w < W))[:, None]
            o_tap = ((o_image * H + o_h) * W + o_w)[:, None] * C + o_C[None, :]
            b_x = tl.load(p_x + o_tap, mask=m_tap, other=0).to(tl.float32)  # [ROWS, COLUMNS]
            b_y = (b_x - b_mean[None, :]) * b_inverse[None, :] * b_weight[None, :] + b_bias[None, :]
            b_y = b_y.to(p_y.dtype.element_ty).to(tl.float32)  # equal after rounding: the first, as in torch
            m_more = m_tap & ((b_y > b_most) | (b_y != b_y))
            b_most, b_choice = tl.where(m_more, b_y, b_most), tl.where(m_more, tap, b_choice)
        if p_choice is not None:
            b_choice = tl.where(b_most > 0, b_choice, NOWHERE)
            tl.store(p_choice + o, b_choice.to(tl.uint8), mask=m)
        b_most = tl.maximum(b_most, 0.0, propagate_nan=tl.PropagateNan.ALL)
        tl.store(p_y + o, b_most.to(p_y.dtype.element_ty), mask=m)


@triton.jit
def load_gradient(p_dy, p_choice, start, group, rows, o, o_C, m, C, H, W, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """dy in fp32 [ROWS, COLUMNS]; after `pool` the sum over the at most 4 windows that chose the position."""
    if p_choice is None:
        b_dy = tl.load(p_dy + o, mask=m, other=0).to(tl.float32)  # [ROWS, COLUMNS]
    else:
        height, width = (H + 1) // 2, (W + 1) // 2  # of dy
        o_R = start + tl.arange(0, ROWS)
        o_image = group * (rows // (H * W)) + o_R // (H * W)
        o_H, o_W = o_R // W % H + 1, o_R % W + 1
        b_dy = tl.zeros([ROWS, COLUMNS], tl.float32)
        for window in tl.static_range(4):
            o_h, o_w = o_H // 2 - window // 2, o_W // 2 - window % 2
            o_down, o_right = o_H - 2 * o_h, o_W - 2 * o_w  # the position in the window
            m_window = (o_down < 3) & (o_right < 3) & (o_h < height) & (o_w < width)
            o_window = ((o_image * height + o_h) * width + o_w)[:, None] * C + o_C[None, :]
            m_both = m & m_window[:, None]
            b_choice = tl.load(p_choice + o_window, mask=m_both, other=255).to(tl.int32)  # [ROWS, COLUMNS]
            b_window = tl.load(p_dy + o_window, mask=m_both, other=0).to(tl.float32)  # [ROWS, COLUMNS]
            b_dy += tl.where(b_choice == (o_down * 3 + o_right)[:, None], b_window, 0.0)
        b_dy = b_dy.to(p_dy.dtype.element_ty).to(tl.float32)  # rounded as in memory
    return b_dy


@triton.jit
def let_through(b_dy, b_normalised, b_weight, b_bias, p_mask, o_row, o_C, m, C, RELU: tl.constexpr, WORD: tl.constexpr):
    """dy' [ROWS, COLUMNS]: dy where the ReLU's input was above zero."""
    if RELU:
        if p_mask is None:
            b_dy = tl.where(b_normalised * b_weight[None, :] + b_bias[None, :] > 0, b_dy, 0.0)
        else:
            o_word = o_row[:, None] * tl.cdiv(C, WORD) + (o_C // WORD)[None, :]
            b_word = tl.load(p_mask + o_word, mask=m, other=0)  # [ROWS, COLUMNS]
            b_dy = tl.where((b_word >> (o_C % WORD)[None, :]) & 1 == 1, b_dy, 0.0)
    return b_dy


@triton.jit
def sums_kernel(
    p_dy,
    p_choice,
    p_second,
    p_kept,
    p_x,
    p_mean,
    p_variance,
    p_weight,
    p_bias,
    p_mask,
    p_parts,
    p_sums,
    p_dparameters,
    p_tickets,
    rows,
    chunk,
    C,
    H,
    W,
    eps,
    RELU: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    WORD: tl.constexpr,
):
    group, o_C, m_C, first, last = place(rows, chunk, C, COLUMNS)
    b_mean, b_inverse, b_weight, b_bias = factors(p_mean, p_variance, p_weight, p_bias, group, o_C, m_C, C, eps)
    b_sum = tl.zeros([ROWS, COLUMNS], tl.float32)
    b_product = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(first, last, ROWS):
        o_row, o, m = tile_at(start, last, group, rows, o_C, m_C, C, ROWS)
        b_dy = load_gradient(p_dy, p_choice, start, group, rows, o, o_C, m, C, H, W, ROWS, COLUMNS)
        if p_second is not None:  # rounded as a sum in memory would be
            b_dy += tl.load(p_second + o, mask=m, other=0).to(tl.float32)  # [ROWS, COLUMNS]
            b_dy = b_dy.to(p_dy.dtype.element_ty).to(tl.float32)
        b_x = tl.load(p_x + o, mask=m, other=0).to(tl.float32)  # [ROWS, COLUMNS]
        b_normalised = (b_x - b_mean[None, :]) * b_inverse[None, :]
        b_dy = let_through(b_dy, b_normalised, b_weight, b_bias, p_mask, o_row, o_C, m, C, RELU, WORD)
        if p_kept is not None:
            tl.store(p_kept + o, b_dy.to(p_kept.dtype.element_ty), mask=m)
        b_sum += b_dy
        b_product += b_dy * b_normalised
    b_sum, b_product = tl.sum(b_sum, 0).to(tl.float64), tl.sum(b_product, 0).to(tl.float64)
    number, block, chunks = tl.program_id(0), tl.program_id(2), tl.num_programs(0)
    groups, of_channels = tl.num_programs(1), tl.num_programs(2)
    bunch, first_chunk, members, bunches = bunch_of(number, chunks, PARTS)
    p_group = p_parts + group * (chunks + bunches) * 2 * C  # of the chunks, then of the bunches
    store_pair(p_group + number * 2 * C, b_sum, b_product, o_C, m_C, C)

    if is_last(ticket_of(p_tickets, group, block, of_channels, bunch, bunches), members):
        b_sum, b_product = merge_sums(p_group + first_chunk * 2 * C, members, o_C, m_C, C, PARTS)
        done = bunches == 1
        if bunches > 1:
            p_bunches = p_group + chunks * 2 * C
            store_pair(p_bunches + bunch * 2 * C, b_sum, b_product, o_C, m_C, C)
            done = is_last(ticket_of(p_tickets, group, block, of_channels, bunches, bunches), bunches)
            if done:
                b_sum, b_product = merge_sums(p_bunches, bunches, o_C, m_C, C, PARTS)
        if done:
            store_pair(p_sums + group * 2 * C, b_sum, b_product, o_C, m_C, C)
            if is_last(ticket_of(p_tickets, groups, block, of_channels, 0, bunches), groups):
                b_dbias = tl.zeros_like(b_sum)
                b_dweight = tl.zeros_like(b_sum)
                for each in range(groups):
                    p_each = p_sums + each * 2 * C + o_C
                    b_dbias += tl.load(p_each, mask=m_C, other=0, cache_modifier=".cg")  # [COLUMNS]
                    b_dweight += tl.load(p_each + C, mask=m_C, other=0, cache_modifier=".cg")  # [COLUMNS]
                store_pair(p_dparameters, b_dweight.to(tl.float32), b_dbias.to(tl.float32), o_C, m_C, C)


@triton.jit
def gradient_kernel(
    p_dy,
    p_choice,
    p_x,
    p_mean,
    p_variance,
    p_weight,
    p_bias,
    p_sums,
    p_count,
    p_dx,
    rows,
    chunk,
    C,
    H,
    W,
    eps,
    RELU: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    group, o_C, m_C, first, last = place(rows, chunk, C, COLUMNS)
    b_mean, b_inverse, b_weight, b_bias = factors(p_mean, p_variance, p_weight, p_bias, group, o_C, m_C, C, eps)
    count = tl.load(p_count + group)
    p_group = p_sums + group * 2 * C + o_C
    b_dy_mean = (tl.load(p_group, mask=m_C, other=0) / count).to(tl.float32)  # [COLUMNS]
    b_product_mean = (tl.load(p_group + C, mask=m_C, other=0) / count).to(tl.float32)  # [COLUMNS]
    b_scale = b_inverse * b_weight
    for start in range(first, last, ROWS):
        _, o, m = tile_at(start, last, group, rows, o_C, m_C, C, ROWS)
        b_dy = load_gradient(p_dy, p_choice, start, group, rows, o, o_C, m, C, H, W, ROWS, COLUMNS)
        b_x = tl.load(p_x + o, mask=m, other=0).to(tl.float32)  # [ROWS, COLUMNS]
        b_normalised = (b_x - b_mean[None, :]) * b_inverse[None, :]
        if RELU:
            b_dy = tl.where(b_normalised * b_weight[None, :] + b_bias[None, :] > 0, b_dy, 0.0)
        b_dx = b_scale[None, :] * (b_dy - b_dy_mean[None, :] - b_normalised * b_product_mean[None, :])
        tl.store(p_dx + o, b_dx.to(p_dx.dtype.element_ty), mask=m)


def dense(x: Tensor) -> Tensor:
    """[N, C] or [N, C, H, W], stored as consecutive rows of channels: x itself if it is, else a copy."""
    return x.contiguous(memory_format=torch.contiguous_format if x.dim() == 2 else torch.channels_last)


def rows_in(x: Tensor, groups: int) -> int:
    """Rows of channels in each group."""
    return x.numel() // (x.shape[1] * groups)


def statistics(x: Tensor, groups: int) -> Tensor:
    """See `batch_norm_reference.statistics`."""
    rows, channels = rows_in(x, groups), x.shape[1]
    if rows == 0:
        return torch.zeros(groups, 2 * channels + 1, dtype=torch.float64, device=x.device)
    kernel = NORM_KERNELS["statistics"]
    cuts = cut(rows, groups, channels, kernel)
    parts = torch.empty(groups, cuts.grid[0] + cuts.bunches, 2, channels, dtype=torch.float64, device=x.device)
    found_GS = torch.empty(groups, 2 * channels + 1, dtype=torch.float64, device=x.device)
    statistics_kernel[cuts.grid](
        dense(x),
        parts,
        found_GS,
        tickets_for(cuts, x.device),
        rows,
        cuts.chunk,
        channels,
        ROWS=cuts.rows,
        COLUMNS=cuts.columns,
        PARTS=kernel.parts,
        **kernel.options,
    )
    return found_GS


def settle(
    parts_RGS: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    tracked: Tensor | None,
    momentum: float | None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `batch_norm_reference.settle`."""
    ranks, groups, channels = *parts_RGS.shape[:2], parts_RGS.shape[2] // 2
    mean_GC = torch.empty(groups, channels, dtype=dtype, device=parts_RGS.device)
    variance_GC = torch.empty_like(mean_GC)
    count_G = torch.empty(groups, dtype=torch.float64, device=parts_RGS.device)
    columns = 64
    settle_kernel[(blocks(channels, columns),)](
        parts_RGS,
        mean_GC,
        variance_GC,
        count_G,
        running_mean,
        running_var,
        tracked,
        ranks,
        parts_RGS.stride(0),
        channels,
        momentum,
        GROUPS=groups,
        COLUMNS=columns,
        num_warps=2,
    )
    if running_mean is not None:
        torch.autograd.graph.increment_version([running_mean, running_var])
    if tracked is not None and (momentum is None or running_mean is None):
        tracked.add_(groups)
    return mean_GC, variance_GC, count_G


def normalise(
    x: Tensor,
    mean_GC: Tensor,
    variance_GC: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    relu: bool,
    keep_mask: bool,
) -> tuple[Tensor, Tensor]:
    """See `batch_norm_reference.normalise`."""
    x, mask = dense(x), empty_mask(x, keep_mask)
    y = torch.empty_like(x)
    _write_normalised(x, mean_GC, variance_GC, weight, bias, residual, y, mask if keep_mask else None, eps, relu)
    return y, mask


def normalise_(
    x: Tensor,
    mean_GC: Tensor,
    variance_GC: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    relu: bool,
) -> None:
    """See `batch_norm_reference.normalise_`; x must be dense."""
    _write_normalised(x, mean_GC, variance_GC, weight, bias, residual, x, None, eps, relu)
    torch.autograd.graph.increment_version([x])


def _write_normalised(x, mean_GC, variance_GC, weight, bias, residual, y, mask, eps: float, relu: bool) -> None:
    groups, channels = mean_GC.shape
    rows = rows_in(x, groups)
    if rows:
        kernel = NORM_KERNELS["normalise"]
        cuts = cut(rows, groups, channels, kernel)
        normalise_kernel[cuts.grid](
            x,
            mean_GC,
            variance_GC,
            weight,
            bias,
            None if residual is None else dense(residual),
            y,
            mask,
            rows,
            cuts.chunk,
            channels,
            eps,
            RELU=relu,
            ROWS=cuts.rows,
            COLUMNS=cuts.columns,
            WORD=WORD,
            **kernel.options,
        )


def pool(
    x: Tensor,
    mean_GC: Tensor,
    variance_GC: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    keep_choice: bool,
) -> tuple[Tensor, Tensor]:
    """See `batch_norm_reference.pool`."""
    groups, channels = mean_GC.shape
    images, _, *size = x.shape
    shape = (images, channels, *pooled_size(x))
    y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    choice = torch.empty_like(y, dtype=torch.uint8) if keep_choice else x.new_empty(0, dtype=torch.uint8)
    rows = y.numel() // channels // groups
    if rows:
        kernel = NORM_KERNELS["pool"]
        cuts = cut(rows, groups, channels, kernel)
        pool_kernel[cuts.grid](
            dense(x),
            mean_GC,
            variance_GC,
            weight,
            bias,
            y,
            choice if keep_choice else None,
            rows,
            cuts.chunk,
            channels,
            *size,
            eps,
            NOWHERE=NOWHERE,
            ROWS=cuts.rows,
            COLUMNS=cuts.columns,
            **kernel.options,
        )
    return y, choice


def sums(
    dy: Tensor,
    x: Tensor,
    mean_GC: Tensor,
    variance_GC: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mask: Tensor | None,
    eps: float,
    relu: bool,
    second: Tensor | None = None,
    keep: bool = False,
    choice: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `batch_norm_reference.sums`."""
    x = dense(x)
    kept = torch.empty_like(x) if keep else x.new_empty(0)
    groups, channels = mean_GC.shape
    size = (1, 1) if choice is None else x.shape[2:]
    rows = rows_in(x, groups)
    if rows == 0:
        zeros = torch.zeros(groups, 2, channels, dtype=torch.float64, device=x.device)
        return zeros, torch.zeros(2, channels, device=x.device), kept
    kernel = NORM_KERNELS["sums" if choice is None else "sums_pool"]
    cuts = cut(rows, groups, channels, kernel)
    parts = torch.empty(groups, cuts.grid[0] + cuts.bunches, 2, channels, dtype=torch.float64, device=x.device)
    sums_G2C = torch.empty(groups, 2, channels, dtype=torch.float64, device=x.device)
    dparameters_2C = torch.empty(2, channels, device=x.device)
    sums_kernel[cuts.grid](
        dense(dy),
        choice,
        None if second is None else dense(second),
        kept if keep else None,
        x,
        mean_GC,
        variance_GC,
        weight,
        bias,
        mask,
        parts,
        sums_G2C,
        dparameters_2C,
        tickets_for(cuts, x.device),
        rows,
        cuts.chunk,
        channels,
        *size,
        eps,
        RELU=relu,
        ROWS=cuts.rows,
        COLUMNS=cuts.columns,
        PARTS=kernel.parts,
        WORD=WORD,
        **kernel.options,
    )
    return sums_G2C, dparameters_2C, kept


def gradient(
    dy: Tensor,
    x: Tensor,
    mean_GC: Tensor,
    variance_GC: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    sums_G2C: Tensor,
    count_G: Tensor,
    eps: float,
    relu: bool,
    choice: Tensor | None = None,
) -> Tensor:
    """See `batch_norm_reference.gradient`."""
    x = dense(x)
    groups, channels = mean_GC.shape
    size = (1, 1) if choice is None else x.shape[2:]
    rows = rows_in(x, groups)
    dx = torch.empty_like(x)
    if rows:
        kernel = NORM_KERNELS["gradient" if choice is None else "gradient_pool"]
        cuts = cut(rows, groups, channels, kernel)
        gradient_kernel[cuts.grid](
            dense(dy),
            choice,
            x,
            mean_GC,
            variance_GC,
            weight,
            bias,
            sums_G2C,
            count_G,
            dx,
            rows,
            cuts.chunk,
            channels,
            *size,
            eps,
            RELU=relu,
            ROWS=cuts.rows,
            COLUMNS=cuts.columns,
            **kernel.options,
        )
    return dx
