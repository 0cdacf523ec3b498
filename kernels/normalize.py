"""Unit embeddings and inverse norms of all views in one launch.

    u = z / max(‖z‖, 1e-12)        1/‖z‖ is kept for the gradient

Each program holds one row in registers: z is read once, u is written once. Rows are first divided by their largest
entry, so that squares neither overflow nor underflow. The program that finishes last reduces the flags of all rows to
two flags, and also writes those to the tail of the rows to be sent (see `tails`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .heuristics import MAX_WIDTH, row_tile
from .reference import DIGIT, SMALLEST_NORM, tail_rows
from .tails import tail_of


@triton.jit
def any_raised(p_flags, first, last, BLOCK: tl.constexpr):
    """1 if any int32 flag in [first, last) is not 0, else 0."""
    raised = 0
    for start in range(first, last, BLOCK):
        o_flag = start + tl.arange(0, BLOCK)
        # Other programs may have written them: bypass the L1 cache, which may be stale.
        b_flag = tl.load(p_flags + o_flag, mask=o_flag < last, other=0, cache_modifier=".cg")  # [BLOCK]
        raised = tl.maximum(raised, tl.max((b_flag != 0).to(tl.int32)))
    return raised


@triton.jit
def unit_embeddings_kernel(
    p_views,
    strides,
    p_unit,
    p_inverse_norm,
    p_nonfinite,
    p_raised,
    p_ticket,
    p_tail,
    N,
    C,
    M,
    written,
    since,
    tail,
    SMALLEST_NORM: tl.constexpr,
    DIGIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    view, image = row // N, (row % N).to(tl.int64)
    o_C = tl.arange(0, BLOCK)
    m_C = (o_C < C) & (row < M)
    b_z = tl.zeros([BLOCK], tl.float32)
    for number in tl.static_range(len(p_views)):
        if view == number:
            b_z = tl.load(p_views[number] + image * strides[number] + o_C, mask=m_C, other=0).to(tl.float32)  # [BLOCK]

    finite = tl.min((tl.abs(b_z) < float("inf")).to(tl.int32)) == 1
    peak = tl.where(finite, tl.max(tl.abs(b_z)), 0.0)
    usable = peak > 0
    peak = tl.where(usable, peak, 1.0)
    b_z = tl.where(usable, b_z / peak, 0.0)
    # The norm of the row divided by its peak; the smallest norm is divided by it too.
    norm = tl.maximum(tl.sqrt(tl.sum(b_z * b_z)), SMALLEST_NORM / peak)
    b_unit = b_z / norm

    tl.store(p_unit + row.to(tl.int64) * C + o_C, b_unit.to(p_unit.dtype.element_ty), mask=(o_C < C) & (row < written))
    if row < M:
        tl.store(p_inverse_norm + row, tl.where(usable, 1.0 / (norm * peak), 0.0))
        tl.store(p_nonfinite + row, 1 - finite.to(tl.int32))

    if p_raised is not None:
        ticket = tl.atomic_add(p_ticket, 1)
        if ticket == tl.num_programs(0) - 1:
            one = any_raised(p_nonfinite, 0, M, BLOCK=1024)
            other = any_raised(p_nonfinite, since, M, BLOCK=1024)
            tl.store(p_raised, one)
            tl.store(p_raised + 1, other)
            tl.store(p_ticket, 0)
            if p_tail is not None:
                for start in range(0, tail, BLOCK):
                    o_tail = start + o_C
                    b_tail = tail_of(o_tail, M - since, one, other, DIGIT).to(p_tail.dtype.element_ty)
                    tl.store(p_tail + o_tail, b_tail, mask=o_tail < tail)


def unit_embeddings(
    views: Sequence[Tensor],
    dtype: torch.dtype,
    nonfinite: Tensor,
    raised: Tensor | None = None,
    ticket: Tensor | None = None,
    since: int = 0,
    spare: int = 0,
) -> tuple[Tensor, Tensor]:
    """See `functional.unit_embeddings`."""
    images, width = views[0].shape
    if width > MAX_WIDTH:
        raise ValueError(f"width {width} exceeds the Triton kernels' {MAX_WIDTH} channels; set UNIGRAD_KERNELS=torch")
    views = [view if view.stride(1) == 1 else view.contiguous() for view in views]
    rows = len(views) * images
    unit_MC = torch.empty(rows + spare, width, dtype=dtype, device=views[0].device)
    inverse_norm_M = torch.empty(rows, dtype=torch.float32, device=views[0].device)
    padding = spare - tail_rows(width) if spare else 0
    tail_TC = unit_MC[rows + padding :] if spare else None
    if raised is not None and ticket is None:
        ticket = torch.zeros((), dtype=torch.int32, device=views[0].device)
    programs = rows + padding if raised is None else max(1, rows + padding)
    if programs and width:
        block, warps = row_tile(width)
        unit_embeddings_kernel[(programs,)](
            tuple(views),
            tuple(view.stride(0) for view in views),
            unit_MC,
            inverse_norm_M,
            nonfinite,
            raised,
            ticket,
            tail_TC,
            max(1, images),
            width,
            rows,
            rows + padding,
            since,
            0 if tail_TC is None else tail_TC.numel(),
            SMALLEST_NORM=SMALLEST_NORM,
            DIGIT=DIGIT,
            BLOCK=block,
            num_warps=warps,
        )
        torch.autograd.graph.increment_version([nonfinite] if raised is None else [nonfinite, raised])
    return unit_MC, inverse_norm_M
