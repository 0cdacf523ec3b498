"""Unit embeddings and inverse norms of all views in one launch.

    u = z / max(‖z‖, 1e-12)        1/‖z‖ is kept for the gradient

One program has one row in registers: z is read once, u written once. Rows are divided by their largest entry
first, so that squares neither overflow nor vanish.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .heuristics import MAX_WIDTH, row_tile


@triton.jit
def unit_embeddings_kernel(
    p_views, strides, p_unit, p_inverse_norm, p_nonfinite, N, C, SMALLEST_NORM: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    view, image = row // N, (row % N).to(tl.int64)
    o_C = tl.arange(0, BLOCK)
    m_C = o_C < C
    b_z = tl.zeros([BLOCK], tl.float32)
    for number in tl.static_range(len(p_views)):
        if view == number:
            b_z = tl.load(p_views[number] + image * strides[number] + o_C, mask=m_C, other=0).to(tl.float32)  # [BLOCK]

    finite = tl.min((tl.abs(b_z) < float("inf")).to(tl.int32)) == 1
    peak = tl.where(finite, tl.max(tl.abs(b_z)), 0.0)
    usable = peak > 0
    peak = tl.where(usable, peak, 1.0)
    b_z = tl.where(usable, b_z / peak, 0.0)
    # Of the row divided by its peak; so is the smallest norm.
    norm = tl.maximum(tl.sqrt(tl.sum(b_z * b_z)), SMALLEST_NORM / peak)
    b_unit = b_z / norm

    tl.store(p_unit + row.to(tl.int64) * C + o_C, b_unit.to(p_unit.dtype.element_ty), mask=m_C)
    tl.store(p_inverse_norm + row, tl.where(usable, 1.0 / (norm * peak), 0.0))
    tl.store(p_nonfinite + row, 1 - finite.to(tl.int32))


def unit_embeddings(
    views: Sequence[Tensor], *, dtype: torch.dtype, nonfinite: Tensor, smallest_norm: float
) -> tuple[Tensor, Tensor]:
    """See `functional.unit_embeddings`."""
    images, width = views[0].shape
    if width > MAX_WIDTH:
        raise ValueError(f"width {width} exceeds the Triton kernels' {MAX_WIDTH} channels; set UNIGRAD_KERNELS=torch")
    views = [view if view.stride(1) == 1 else view.contiguous() for view in views]
    rows = len(views) * images
    unit_MC = torch.empty(rows, width, dtype=dtype, device=views[0].device)
    inverse_norm_M = torch.empty(rows, dtype=torch.float32, device=views[0].device)
    if unit_MC.numel():
        tile = row_tile(width)
        unit_embeddings_kernel[(rows,)](
            tuple(views),
            tuple(view.stride(0) for view in views),
            unit_MC,
            inverse_norm_M,
            nonfinite,
            images,
            width,
            SMALLEST_NORM=smallest_norm,
            BLOCK=tile.block,
            num_warps=tile.warps,
        )
        torch.autograd.graph.increment_version([nonfinite])
    return unit_MC, inverse_norm_M
