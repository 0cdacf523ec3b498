"""A convolution of 1 × 1 as a matrix product, with the norm before it and the statistics of the norm after it.

    x′ = relu((x − mean)/σ · γ + β), optional; in x's dtype     prologue
    y  = x′ · Wᵀ, summed in fp32, in x's dtype                  rows of K channels to rows of C
    n, mean and Σ (y − mean)² per group and channel             epilogue

x is read once and y is written once. Separate kernels would also read and write x′, and read y for its statistics. A
program computes one tile of y; the statistics of tiles are merged like those of chunks, by `batch_norm_merges`.
Programs that need the same rows of x run at the same time, so that all but the first find them in the cache.

Shape suffixes: G groups, C channels of y, K channels of x, S = 2C + 1 statistics.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .batch_norm import dense, factors, rows_in
from .batch_norm_merges import finish_statistics, tickets_for
from .dispatch import precision_of
from .heuristics import norm_product_on, tiled


@triton.jit
def norm_product_kernel(
    p_x,
    p_mean,
    p_variance,
    p_weight,
    p_bias,
    p_matrix,
    p_y,
    p_parts,
    p_statistics,
    p_tickets,
    rows,
    K,
    C,
    eps,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    BUNCH: tl.constexpr,
    PARTS: tl.constexpr,
):
    of_channels = tl.cdiv(C, COLUMNS)
    number, block = (tl.program_id(0) // of_channels).to(tl.int64), tl.program_id(0) % of_channels
    group = tl.program_id(1).to(tl.int64)
    o_column = tl.arange(0, COLUMNS)
    o_C = block * COLUMNS + o_column
    m_C = o_C < C
    start = number * ROWS
    p_x += (group * rows + start) * K
    p_y += (group * rows + start) * C
    p_matrix += tl.cast(block, tl.int64) * COLUMNS * K
    o_R = tl.arange(0, ROWS)
    m_R = o_R < rows - start

    # The product is transposed, so that a thread has few channels and the sums over rows take few registers.
    b_y = tl.zeros([COLUMNS, ROWS], tl.float32)
    for depth in range(0, K, DEPTH):
        o_K = depth + tl.arange(0, DEPTH)
        m_K = o_K < K
        m_x = m_K[:, None] & m_R[None, :]
        b_x = tl.load(p_x + o_R[None, :] * K + o_K[:, None], mask=m_x, other=0)  # [DEPTH, ROWS]
        if p_mean is not None:
            b_mean, b_inverse, b_weight, b_bias = factors(p_mean, p_variance, p_weight, p_bias, group, o_K, m_K, K, eps)
            b_x = (b_x.to(tl.float32) - b_mean[:, None]) * (b_inverse * b_weight)[:, None] + b_bias[:, None]
            b_x = tl.maximum(b_x, 0.0, propagate_nan=tl.PropagateNan.ALL).to(p_x.dtype.element_ty)
        m_matrix = m_C[:, None] & m_K[None, :]
        b_matrix = tl.load(p_matrix + o_column[:, None] * K + o_K[None, :], mask=m_matrix, other=0)  # [COLUMNS, DEPTH]
        b_y = tl.dot(b_matrix, b_x, b_y, input_precision=PRECISION)
    b_rounded = b_y.to(p_y.dtype.element_ty)
    tl.store(p_y + o_R[None, :] * C + o_C[:, None], b_rounded, mask=m_C[:, None] & m_R[None, :])

    b_y = b_rounded.to(tl.float32)
    b_shift = tl.sum(tl.where((o_R == 0)[None, :], b_y, 0.0), 1)  # [COLUMNS]; sums of what is left round less
    b_y = tl.where(m_R[None, :], b_y - b_shift[:, None], 0.0)
    b_total, b_square = tl.sum(b_y, 1).to(tl.float64), tl.sum(b_y * b_y, 1).to(tl.float64)
    count = tl.minimum(rows - start, ROWS).to(tl.float64)
    finish_statistics(
        p_parts,
        p_statistics,
        p_tickets,
        b_shift.to(tl.float64) + b_total / count,
        b_square - b_total * b_total / count,
        number,
        tl.cast(tl.cdiv(rows, ROWS), tl.int64),
        group,
        block,
        of_channels,
        rows,
        ROWS,
        o_C,
        m_C,
        C,
        BUNCH,
        PARTS,
    )


def norm_product(
    x: Tensor,
    matrix_CK: Tensor,
    groups: int,
    mean_GK: Tensor | None,
    variance_GK: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """See `batch_norm_reference.norm_product`."""
    images, depth, *size = x.shape
    channels = len(matrix_CK)
    rows = rows_in(x, groups)
    y = torch.empty(images, channels, *size, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    if rows == 0:
        return y, torch.zeros(groups, 2 * channels + 1, dtype=torch.float64, device=x.device)
    settings = norm_product_on(x.device, mean_GK is not None)
    cuts = tiled(rows, groups, channels, settings)
    parts = torch.empty(groups, cuts.grid[0] + cuts.bunches, 2, channels, dtype=torch.float64, device=x.device)
    found_GS = torch.empty(groups, 2 * channels + 1, dtype=torch.float64, device=x.device)
    norm_product_kernel[(cuts.grid[0] * cuts.grid[2], groups)](
        dense(x),
        mean_GK,
        variance_GK,
        weight,
        bias,
        matrix_CK.contiguous(),
        y,
        parts,
        found_GS,
        tickets_for(cuts, x.device),
        rows,
        depth,
        channels,
        eps,
        PRECISION=precision_of(x),
        ROWS=cuts.rows,
        COLUMNS=cuts.columns,
        DEPTH=settings.tile.depth,
        BUNCH=settings.bunch,
        PARTS=settings.parts,
        **settings.options,
    )
    return y, found_GS
