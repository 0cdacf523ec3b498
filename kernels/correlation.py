"""In-place moving-average update of the correlation F, for whole F or for a block of its rows.

    F ← ρ·F + (1−ρ)/count · UᵀU

Each program computes one tile of F. A whole F is symmetric: of two mirrored tiles only the one on or above the diagonal
is computed. How much of F is written depends on what the product reads next:

  - With a working copy (bf16 or fp16, the product's operand) only the upper triangles of F and of the copy are kept up
    to date, in blocks of `TRIANGLE` rows and columns; blocks on the diagonal are written whole. This moves 5·C² bytes:
    half of F is read (2·C²) and written (2·C²), half of the copy is written (C²).
  - Without a working copy (fp32) the product reads F itself, and both halves are written: 6·C² bytes.

The block of rows of a sharded F does not contain its mirror image, so all of its tiles are computed.

`mirror_` fills the lower triangle from the upper one in one launch, for readers that need all of F: 2·C² bytes read,
2·C² written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .dispatch import precision_of
from .heuristics import TRIANGLE, Tile, blocks, tile_for, working_scale

MIRRORED = 64  # rows and columns of a tile that is mirrored


@triton.jit
def upper_tile(index):
    """(i, j) with i ≤ j for tile `index`, counting down the columns of the upper triangle: index = j·(j+1)/2 + i."""
    column = ((tl.sqrt(8.0 * index.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    # The square root is rounded and may be off by one either way; integer arithmetic corrects it.
    column = tl.where(column * (column + 1) // 2 > index, column - 1, column)
    column = tl.where((column + 1) * (column + 2) // 2 <= index, column + 1, column)
    return index - column * (column + 1) // 2, column


@triton.jit
def update_correlation_kernel(
    p_correlation,
    p_working,
    p_unit,
    p_decay,
    p_count,
    p_skip,
    p_updates,
    M,
    R,
    C,
    stride_M,
    stride_C,
    first_row,
    working_scale,
    SYMMETRIC: tl.constexpr,
    WORKING: tl.constexpr,
    TRIANGLE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
):
    index = tl.program_id(0)
    if SYMMETRIC:
        i, j = upper_tile(index)
    else:
        i, j = index % tl.cdiv(R, BLOCK), index // tl.cdiv(R, BLOCK)
    o_row = i * BLOCK + tl.arange(0, BLOCK)
    o_column = j * BLOCK + tl.arange(0, BLOCK)
    m_row, m_column = o_row < R, o_column < C
    if p_skip is not None:
        m_row = m_row & (tl.load(p_skip) == 0)  # if raised, nothing is read or written

    b_product = tl.zeros([BLOCK, BLOCK], tl.float32)
    for start in range(0, M, DEPTH):
        o_M = start + tl.arange(0, DEPTH)
        p_M = p_unit + o_M[:, None].to(tl.int64) * stride_M
        m_M = (o_M < M)[:, None]
        p_left = p_M + (first_row + o_row)[None, :].to(tl.int64) * stride_C
        b_left = tl.load(p_left, mask=m_M & m_row[None, :], other=0)  # [DEPTH, BLOCK]
        p_right = p_M + o_column[None, :].to(tl.int64) * stride_C
        b_right = tl.load(p_right, mask=m_M & m_column[None, :], other=0)  # [DEPTH, BLOCK]
        b_product = tl.dot(tl.trans(b_left), b_right, b_product, input_precision=PRECISION)
    if SYMMETRIC and i == j:
        b_product = tl.where(o_row[:, None] <= o_column[None, :], b_product, tl.trans(b_product))

    decay = tl.load(p_decay)
    if p_updates is not None:
        decay = tl.where(tl.load(p_updates) == 0, 0.0, decay)
    o_tile = o_row[:, None].to(tl.int64) * C + o_column[None, :]
    m_tile = m_row[:, None] & m_column[None, :]
    b_old = tl.load(p_correlation + o_tile, mask=m_tile, other=0)  # [BLOCK, BLOCK]
    b_new = b_product * ((1.0 - decay) / tl.load(p_count))
    b_new = tl.where(decay == 0.0, b_new, decay * b_old + b_new)
    tl.store(p_correlation + o_tile, b_new, mask=m_tile)
    if WORKING:
        b_working = (b_new * working_scale).to(p_working.dtype.element_ty)
        tl.store(p_working + o_tile, b_working, mask=m_tile)

    # Tiles are square, so none straddles the diagonal. One program has both tiles of a pair: no other one writes here.
    if SYMMETRIC and (not WORKING or BLOCK < TRIANGLE):
        mirrored = i != j
        if WORKING:
            mirrored = mirrored and i * BLOCK // TRIANGLE == j * BLOCK // TRIANGLE
        if mirrored:
            o_mirror = o_column[:, None].to(tl.int64) * C + o_row[None, :]
            m_mirror = m_column[:, None] & m_row[None, :]
            tl.store(p_correlation + o_mirror, tl.trans(b_new), mask=m_mirror)
            if WORKING:
                tl.store(p_working + o_mirror, tl.trans(b_working), mask=m_mirror)


@triton.jit
def mirror_kernel(p_correlation, C, BLOCK: tl.constexpr):
    i, j = upper_tile(tl.program_id(0))
    o_row = i * BLOCK + tl.arange(0, BLOCK)
    o_column = j * BLOCK + tl.arange(0, BLOCK)
    o_upper = o_row[:, None].to(tl.int64) * C + o_column[None, :]
    m_upper = (o_row[:, None] < o_column[None, :]) & (o_column < C)[None, :]
    b_upper = tl.load(p_correlation + o_upper, mask=m_upper, other=0)  # [BLOCK, BLOCK]
    o_lower = o_column[:, None].to(tl.int64) * C + o_row[None, :]
    m_lower = (o_row[None, :] < o_column[:, None]) & (o_column < C)[:, None]
    tl.store(p_correlation + o_lower, tl.trans(b_upper), mask=m_lower)


def mirror_(correlation: Tensor) -> None:
    """See `functional.mirror_`."""
    width = correlation.shape[0]
    side = blocks(width, MIRRORED)
    mirror_kernel[(side * (side + 1) // 2,)](correlation, width, BLOCK=MIRRORED, num_warps=8)
    torch.autograd.graph.increment_version([correlation])


def update_correlation_(
    correlation: Tensor,
    unit_MC: Tensor,
    decay: Tensor,
    count: Tensor,
    skip: Tensor | None = None,
    updates: Tensor | None = None,
    first_row: int = 0,
    working: Tensor | None = None,
    input_precision: str = "",
    tile: Tile | None = None,
) -> None:
    """See `functional.update_correlation_`; `tile` defaults to the table's entry."""
    rows, width = correlation.shape
    unit_MC = unit_MC.contiguous()
    input_precision = input_precision or precision_of(unit_MC)
    if skip is not None and skip.numel() != 1:
        skip = skip.ne(0).any().to(skip.dtype)
    if unit_MC.dtype == torch.float32 and input_precision != "ieee":
        # TF32 tensor cores need operands contiguous along the summed dimension; rows of zeros keep them aligned.
        odd = -len(unit_MC) % 16
        unit_MC = (torch.nn.functional.pad(unit_MC.T, (0, odd)) if odd else unit_MC.T).contiguous().T
    tile = tile or tile_for("update", unit_MC, input_precision)
    row_tiles, column_tiles = blocks(rows, tile.rows), blocks(width, tile.rows)
    symmetric = rows == width
    tiles = column_tiles * (column_tiles + 1) // 2 if symmetric else row_tiles * column_tiles
    update_correlation_kernel[(tiles,)](
        correlation,
        working,
        unit_MC,
        decay,
        count,
        skip,
        updates,
        unit_MC.shape[0],
        rows,
        width,
        *unit_MC.stride(),
        first_row,
        1.0 if working is None else working_scale(working.dtype, width),
        SYMMETRIC=symmetric,
        WORKING=working is not None,
        TRIANGLE=TRIANGLE,
        PRECISION=input_precision,
        BLOCK=tile.rows,
        DEPTH=tile.depth,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    torch.autograd.graph.increment_version([correlation] if working is None else [correlation, working])
