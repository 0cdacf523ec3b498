"""Tails: numbers about a rank's rows that are gathered with them, appended as extra rows.

A tail begins with the number of rows, in three digits that every dtype of unit embeddings represents exactly, followed
by two flags. One launch combines the tails of all ranks and replaces them by zeros, which contribute nothing to F.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .reference import DIGIT, tail_rows


@triton.jit
def tail_of(o_tail, count, first_flag, second_flag, DIGIT: tl.constexpr):
    """The numbers at the offsets `o_tail` of a tail, in fp32."""
    b_digit = tl.where(o_tail == 0, count, tl.where(o_tail == 1, count // DIGIT, count // (DIGIT * DIGIT))) % DIGIT
    b_flag = tl.where(o_tail == 3, first_flag, tl.where(o_tail == 4, second_flag, 0))
    return tl.where(o_tail < 3, b_digit, b_flag).to(tl.float32)


@triton.jit
def sum_tails_kernel(p_gathered, p_count, p_flags, W, stride_rank, offset, DIGIT: tl.constexpr, BLOCK: tl.constexpr):
    count, first_flag, second_flag = 0, 0, 0
    for start in range(0, W, BLOCK):
        o_W = start + tl.arange(0, BLOCK)
        m_W = o_W < W
        p_tail = p_gathered + o_W.to(tl.int64) * stride_rank + offset
        b_count = tl.load(p_tail, mask=m_W, other=0).to(tl.int32)  # [BLOCK]
        b_count += tl.load(p_tail + 1, mask=m_W, other=0).to(tl.int32) * DIGIT
        b_count += tl.load(p_tail + 2, mask=m_W, other=0).to(tl.int32) * (DIGIT * DIGIT)
        count += tl.sum(b_count)
        first_flag = tl.maximum(first_flag, tl.max(tl.load(p_tail + 3, mask=m_W, other=0).to(tl.int32)))
        second_flag = tl.maximum(second_flag, tl.max(tl.load(p_tail + 4, mask=m_W, other=0).to(tl.int32)))
        for place in tl.static_range(5):
            tl.store(p_tail + place, tl.zeros([BLOCK], p_gathered.dtype.element_ty), mask=m_W)
    empty = (count == 0).to(tl.int32)
    tl.store(p_count, count.to(tl.float32))
    tl.store(p_flags, first_flag)
    tl.store(p_flags + 1, second_flag)
    tl.store(p_flags + 2, tl.maximum(first_flag, empty))
    tl.store(p_flags + 3, tl.maximum(second_flag, empty))


def sum_tails_(gathered_MC: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
    """See `reference.sum_tails_`."""
    count = torch.empty((), dtype=torch.float32, device=gathered_MC.device)
    flags = torch.empty(4, dtype=torch.int32, device=gathered_MC.device)
    width = gathered_MC.shape[1]
    stride = gathered_MC.numel() // ranks
    sum_tails_kernel[(1,)](
        gathered_MC, count, flags, ranks, stride, stride - tail_rows(width) * width, DIGIT=DIGIT, BLOCK=128
    )
    torch.autograd.graph.increment_version([gathered_MC])
    return count, flags
