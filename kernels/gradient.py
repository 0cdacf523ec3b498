"""UniGrad's gradient with respect to the embeddings and the terms of the objective, in two launches.

    p  = u·F                                              `correlation_product`
    g  = −m⁺ + λ·p                                        gradient with respect to u
    dz = (g − u·(u·g)) / ‖z‖ · scale                      `embedding_gradient`
    m⁺ = ratio·m[first] + (1−ratio)·m[second]             one target, the mean of two, or a CutMix pair
    L  = scale · Σ rows of −u·m⁺ + (λ/2)·u·p

The first launch is a plain matrix product: its tiles can be large, and it also serves a block of columns of a sharded
F. The second launch has one program per row, which owns the whole row: its dot products need no second stage, p, u and
m⁺ are read once (rows too long for the registers twice, the second time from the cache), and dz is written once, over p
if it is fp32. Fusing this into the product as an epilogue would not save memory traffic: it would also have to read u
and m⁺, and would write g instead of p for a second launch. And its tiles would be half as large.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .dispatch import precision_of
from .heuristics import HALF, Tile, blocks, row_tile, tile_for, working_scale
from .normalize import any_raised


@triton.jit
def add_product(b_sum, b_left, b_right, one, PRECISION: tl.constexpr):
    """b_sum + b_left · b_right."""
    if b_left.dtype == tl.float32 and PRECISION == "ieee":
        # Without tensor cores one chain of roundings would run over all C channels. A factor that the compiler does
        # not know to be 1 keeps it from fusing the sum into that chain.
        return b_sum + one * tl.dot(b_left, b_right, input_precision=PRECISION)
    return tl.dot(b_left, b_right, b_sum, input_precision=PRECISION)


@triton.jit
def correlation_product_kernel(
    p_unit,
    p_correlation,
    p_product,
    M,
    R,
    C,
    working_scale,
    unscale,
    TRIANGLE: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    # Consecutive programs use the same columns of F, so that F is read from memory once.
    index = tl.program_id(0)
    i, j = index % tl.cdiv(M, ROWS), index // tl.cdiv(M, ROWS)
    o_M = i * ROWS + tl.arange(0, ROWS)
    o_R = j * COLUMNS + tl.arange(0, COLUMNS)
    o_D = tl.arange(0, DEPTH)
    m_M, m_R = o_M < M, o_R < R
    p_unit_M = p_unit + o_M[:, None].to(tl.int64) * C

    # F[k, r] and F[r, k] are the same number. In a triangle, blocks on the diagonal are whole and blocks below it are
    # out of date: F's entries above this block of columns are read down the columns, the others along the rows. COLUMNS
    # divides a block of the triangle and DEPTH divides COLUMNS, so that neither loop steps across the diagonal.
    b_product = tl.zeros([ROWS, COLUMNS], tl.float32)
    above = 0
    if TRIANGLE:
        above = j * COLUMNS
        for start in range(0, above, DEPTH):
            o_C = start + o_D
            b_unit = tl.load(p_unit_M + o_C[None, :], mask=m_M[:, None], other=0)  # [ROWS, DEPTH]
            p_column = p_correlation + o_C[:, None].to(tl.int64) * C + o_R[None, :]
            b_column = tl.load(p_column, mask=m_R[None, :], other=0)  # [DEPTH, COLUMNS]
            b_product = add_product(b_product, b_unit, b_column, unscale, PRECISION)
    for start in range(above, C, DEPTH):
        o_C = start + o_D
        m_C = o_C < C
        b_unit = tl.load(p_unit_M + o_C[None, :], mask=m_M[:, None] & m_C[None, :], other=0)  # [ROWS, DEPTH]
        p_row = p_correlation + o_R[None, :].to(tl.int64) * C + o_C[:, None]
        b_column = tl.load(p_row, mask=m_R[None, :] & m_C[:, None], other=0)  # [DEPTH, COLUMNS]
        if b_column.dtype != b_unit.dtype:
            b_column = (b_column * working_scale).to(b_unit.dtype)
        b_product = add_product(b_product, b_unit, b_column, unscale, PRECISION)

    o_product = o_M[:, None].to(tl.int64) * R + o_R[None, :]
    tl.store(p_product + o_product, b_product * unscale, mask=m_M[:, None] & m_R[None, :])


@triton.jit
def row_of(p_product, p_unit, p_first, p_second, ratio, o_C, m_C, PAIR: tl.constexpr):
    """p, u and m⁺ for some channels of a row, in fp32."""
    b_product = tl.load(p_product + o_C, mask=m_C, other=0)  # [BLOCK]
    b_unit = tl.load(p_unit + o_C, mask=m_C, other=0).to(tl.float32)  # [BLOCK]
    b_positive = tl.load(p_first + o_C, mask=m_C, other=0).to(tl.float32)  # [BLOCK]
    if PAIR:
        b_second = tl.load(p_second + o_C, mask=m_C, other=0).to(tl.float32)  # [BLOCK]
        b_positive = ratio * b_positive + (1.0 - ratio) * b_second
    return b_product, b_unit, b_positive


@triton.jit
def sum_terms(p_cosine, p_negative, p_terms, p_nonfinite, flags, M, balance, scale, BLOCK: tl.constexpr):
    """L, u·m⁺, u·F·uᵀ and u·g over all rows, and whether any row was not finite; summed in a fixed order."""
    b_cosine = tl.zeros([BLOCK], tl.float32)
    b_negative = tl.zeros([BLOCK], tl.float32)
    for start in range(0, M, BLOCK):
        o_M = start + tl.arange(0, BLOCK)
        # Written by other programs: bypass the L1 cache, which may be stale.
        b_cosine += tl.load(p_cosine + o_M, mask=o_M < M, other=0, cache_modifier=".cg")  # [BLOCK]
        b_negative += tl.load(p_negative + o_M, mask=o_M < M, other=0, cache_modifier=".cg")  # [BLOCK]
    cosine, negative = tl.sum(b_cosine) * scale, tl.sum(b_negative) * scale
    tl.store(p_terms, balance * 0.5 * negative - cosine)
    tl.store(p_terms + 1, cosine)
    tl.store(p_terms + 2, negative)
    tl.store(p_terms + 3, balance * negative - cosine)
    raised = 0.0
    if p_nonfinite is not None:
        raised = any_raised(p_nonfinite, 0, flags, BLOCK=BLOCK).to(tl.float32)
    tl.store(p_terms + 4, raised)


@triton.jit
def embedding_gradient_kernel(
    p_product,
    p_unit,
    p_inverse_norm,
    p_target,
    p_first,
    p_second,
    p_ratio,
    p_gradient,
    p_cosine,
    p_negative,
    p_terms,
    p_nonfinite,
    p_skip,
    p_updates,
    p_ticket,
    M,
    C,
    flags,
    skips,
    balance,
    scale,
    WHOLE_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    offset = row.to(tl.int64) * C
    first = row.to(tl.int64)
    if p_first is not None:
        first = tl.load(p_first + row).to(tl.int64)
    second, ratio = first, 1.0
    PAIR: tl.constexpr = p_second is not None
    if PAIR:
        second, ratio = tl.load(p_second + row).to(tl.int64), tl.load(p_ratio + row).to(tl.float32)
    p_first_row, p_second_row = p_target + first * C, p_target + second * C
    factor = tl.load(p_inverse_norm + row) * scale

    o_C = tl.arange(0, BLOCK)
    if WHOLE_ROW:
        m_C = o_C < C
        b_product, b_unit, b_positive = row_of(
            p_product + offset, p_unit + offset, p_first_row, p_second_row, ratio, o_C, m_C, PAIR
        )
        cosine, negative = tl.sum(b_unit * b_positive), tl.sum(b_unit * b_product)
        along = balance * negative - cosine
        b_gradient = (balance * b_product - b_positive - b_unit * along) * factor
        tl.store(p_gradient + offset + o_C, b_gradient.to(p_gradient.dtype.element_ty), mask=m_C)
    else:  # too long for the registers: the row is read a second time, from the cache
        b_cosine = tl.zeros([BLOCK], tl.float32)
        b_negative = tl.zeros([BLOCK], tl.float32)
        for start in range(0, C, BLOCK):
            m_C = start + o_C < C
            b_product, b_unit, b_positive = row_of(
                p_product + offset, p_unit + offset, p_first_row, p_second_row, ratio, start + o_C, m_C, PAIR
            )
            b_cosine += b_unit * b_positive
            b_negative += b_unit * b_product
        cosine, negative = tl.sum(b_cosine), tl.sum(b_negative)
        along = balance * negative - cosine
        for start in range(0, C, BLOCK):
            m_C = start + o_C < C
            b_product, b_unit, b_positive = row_of(
                p_product + offset, p_unit + offset, p_first_row, p_second_row, ratio, start + o_C, m_C, PAIR
            )
            b_gradient = (balance * b_product - b_positive - b_unit * along) * factor
            tl.store(p_gradient + offset + start + o_C, b_gradient.to(p_gradient.dtype.element_ty), mask=m_C)

    # When a program takes the last ticket, all rows are done. It sums them in an order that does not depend on which
    # program it is. A separate launch for these few numbers would cost more than the sums.
    tl.store(p_cosine + row, cosine)
    tl.store(p_negative + row, negative)
    if tl.atomic_add(p_ticket, 1) == M - 1:
        sum_terms(p_cosine, p_negative, p_terms, p_nonfinite, flags, M, balance, scale, BLOCK=1024)
        tl.store(p_ticket, 0)
        if p_updates is not None:  # not in the launch that updates F, because every program there reads it
            taken = 1
            if p_skip is not None:
                taken = 1 - any_raised(p_skip, 0, skips, BLOCK=1024)
            tl.store(p_updates, tl.load(p_updates) + taken)


def correlation_product(
    unit_MC: Tensor, correlation: Tensor, input_precision: str = "", tile: Tile | None = None
) -> Tensor:
    """See `functional.correlation_product`; `tile` defaults to the table's entry."""
    unit_MC = unit_MC.contiguous().to(correlation.dtype if correlation.dtype in HALF else unit_MC.dtype)
    correlation = correlation.contiguous()
    input_precision = input_precision or precision_of(unit_MC)
    rows, width = correlation.shape
    images = unit_MC.shape[0]
    product_MR = torch.empty(images, rows, dtype=torch.float32, device=unit_MC.device)
    if not product_MR.numel():
        return product_MR
    is_working = correlation.dtype != torch.float32
    scale = working_scale(unit_MC.dtype, width)
    tile = tile or tile_for("product", unit_MC, input_precision)
    tiles = blocks(images, tile.rows) * blocks(rows, tile.columns)
    correlation_product_kernel[(tiles,)](
        unit_MC,
        correlation,
        product_MR,
        images,
        rows,
        width,
        scale,
        1.0 / scale,
        TRIANGLE=is_working and rows == width,
        PRECISION=input_precision,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return product_MR


def embedding_gradient(
    product_MC: Tensor,
    gradient_MC: Tensor,
    unit_MC: Tensor,
    inverse_norm_M: Tensor,
    target_KC: Tensor,
    first: Tensor | None,
    second: Tensor | None,
    ratio: Tensor | None,
    nonfinite: Tensor | None,
    skip: Tensor | None,
    updates: Tensor | None,
    ticket: Tensor | None,
    balance: float,
    scale: float,
) -> Tensor:
    """Returns the terms of `functional.embedding_gradient`; `gradient_MC` is written and may be `product_MC`."""
    device, (M, C) = product_MC.device, product_MC.shape
    cosine_M, negative_M = (torch.empty(M, dtype=torch.float32, device=device) for _ in range(2))
    terms = torch.empty(5, dtype=torch.float32, device=device)
    ticket = torch.zeros((), dtype=torch.int32, device=device) if ticket is None else ticket
    block, warps = row_tile(C, arrays=3)
    embedding_gradient_kernel[(M,)](
        product_MC,
        unit_MC,
        inverse_norm_M,
        target_KC,
        first,
        second,
        ratio,
        gradient_MC,
        cosine_M,
        negative_M,
        terms,
        nonfinite,
        skip,
        updates,
        ticket,
        M,
        C,
        0 if nonfinite is None else nonfinite.numel(),
        0 if skip is None else skip.numel(),
        balance,
        scale,
        WHOLE_ROW=block >= C,
        BLOCK=block,
        num_warps=warps,
    )
    if updates is not None:
        torch.autograd.graph.increment_version([updates])
    return terms
