"""Merges what programs have found in chunks of the rows of a group, within the kernel that they run.

The results of the chunks are merged in bunches, and then those of the bunches, by the program that takes the last
ticket and in a fixed order, so that two runs are bitwise equal. They are two float64 numbers per channel: mean and
Σ (x − mean)², or two sums.

Shape suffix: C channels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .heuristics import Cut


@triton.jit
def is_last(p_ticket, programs):
    """Whether this is the last program to take the shared ticket; if so, what the others stored before can be read."""
    tl.debug_barrier()
    last = tl.atomic_add(p_ticket, 1) == programs - 1
    if last:
        tl.store(p_ticket, 0)
    return last


@triton.jit
def bunch_of(number, chunks, BUNCH: tl.constexpr):
    """Of a chunk: its bunch, the bunch's first chunk and number of chunks, and the number of bunches."""
    bunch = number // BUNCH
    return bunch, bunch * BUNCH, tl.minimum(chunks - bunch * BUNCH, BUNCH), tl.cdiv(chunks, BUNCH)


@triton.jit
def ticket_of(p_tickets, group, block, of_channels, bunch, bunches):
    """The ticket of a bunch of chunks for one of the blocks of channels; `bunches` for that of all bunches."""
    return p_tickets + (group * of_channels + block) * (bunches + 1) + bunch


@triton.jit
def parts_of(p_parts, parts, o_C, m_C, C, PARTS: tl.constexpr):
    """Pointers to the first number of `parts` parts, and a mask of those that exist, [PARTS, COLUMNS]."""
    o_P = tl.arange(0, PARTS)
    return p_parts + o_P[:, None] * 2 * C + o_C[None, :], (o_P < parts)[:, None] & m_C[None, :]


@triton.jit
def merge_statistics(p_parts, parts, most, size, rows, o_C, m_C, C, PARTS: tl.constexpr):
    """Mean and Σ (x − mean)² [COLUMNS] of `rows` rows, from parts of `size` rows each and a last one of the rest.

    There are at most `most` parts; PARTS of them are read at a time.
    """
    # Written by other programs: bypass the L1 cache, which may be stale.
    b_pivot = tl.load(p_parts + o_C, mask=m_C, other=0, cache_modifier=".cg")  # [COLUMNS]
    b_shifted = tl.zeros_like(b_pivot)
    b_squares = tl.zeros_like(b_pivot)
    for first in range(0, most, PARTS):
        p, m = parts_of(p_parts + tl.cast(first, tl.int64) * 2 * C, parts - first, o_C, m_C, C, PARTS)
        o_P = first + tl.arange(0, PARTS).to(tl.int64)
        b_count = (tl.minimum((o_P + 1) * size, rows) - o_P * size).to(tl.float64)[:, None]
        b_difference = tl.load(p, mask=m, other=0, cache_modifier=".cg") - b_pivot[None, :]  # [PARTS, COLUMNS]
        b_within = tl.load(p + C, mask=m, other=0, cache_modifier=".cg")  # [PARTS, COLUMNS]
        b_shifted += tl.sum(tl.where(m, b_count * b_difference, 0.0), 0)
        b_squares += tl.sum(tl.where(m, b_within + b_count * b_difference * b_difference, 0.0), 0)
    count = tl.cast(rows, tl.float64)
    return b_pivot + b_shifted / count, b_squares - b_shifted * b_shifted / count


@triton.jit
def merge_sums(p_parts, parts, o_C, m_C, C, PARTS: tl.constexpr):
    """Both sums of all parts, [COLUMNS]."""
    p, m = parts_of(p_parts, parts, o_C, m_C, C, PARTS)
    b_sums = tl.load(p, mask=m, other=0, cache_modifier=".cg")  # [PARTS, COLUMNS]
    b_products = tl.load(p + C, mask=m, other=0, cache_modifier=".cg")  # [PARTS, COLUMNS]
    return tl.sum(b_sums, 0), tl.sum(b_products, 0)


@triton.jit
def store_pair(p_pair, b_first, b_second, o_C, m_C, C):
    """Two numbers per channel."""
    tl.store(p_pair + o_C, b_first, mask=m_C)
    tl.store(p_pair + C + o_C, b_second, mask=m_C)


@triton.jit
def finish_statistics(
    p_parts,
    p_statistics,
    p_tickets,
    b_mean,
    b_squares,
    number,
    chunks,
    group,
    block,
    of_channels,
    rows,
    chunk,
    o_C,
    m_C,
    C,
    BUNCH: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Store a chunk's mean and Σ (x − mean)² [COLUMNS], and merge all chunks if it is the last one of them.

    Bunches of BUNCH chunks are merged, PARTS at a time; unless BUNCH is larger, there are at most PARTS bunches.
    """
    bunch, first_chunk, members, bunches = bunch_of(number, chunks, BUNCH)
    p_group = p_parts + group * (chunks + bunches) * 2 * C  # of the chunks, then of the bunches
    store_pair(p_group + number * 2 * C, b_mean, b_squares, o_C, m_C, C)

    if is_last(ticket_of(p_tickets, group, block, of_channels, bunch, bunches), members):
        start = first_chunk * chunk
        p_bunch = p_group + first_chunk * 2 * C
        b_mean, b_squares = merge_statistics(
            p_bunch,
            members,
            members if BUNCH > PARTS else PARTS,
            chunk,
            tl.minimum(members * chunk, rows - start),
            o_C,
            m_C,
            C,
            PARTS,
        )
        done = bunches == 1
        if bunches > 1:
            p_bunches = p_group + chunks * 2 * C
            store_pair(p_bunches + bunch * 2 * C, b_mean, b_squares, o_C, m_C, C)
            done = is_last(ticket_of(p_tickets, group, block, of_channels, bunches, bunches), bunches)
            if done:
                most = bunches if BUNCH > PARTS else PARTS
                b_mean, b_squares = merge_statistics(p_bunches, bunches, most, BUNCH * chunk, rows, o_C, m_C, C, PARTS)
        if done:
            p_out = p_statistics + group * (2 * C + 1)
            b_squares = tl.maximum(b_squares, 0.0, propagate_nan=tl.PropagateNan.ALL)
            store_pair(p_out, b_mean, b_squares, o_C, m_C, C)
            tl.store(p_out + 2 * C + o_C, tl.zeros_like(b_mean) + tl.cast(rows, tl.float64), mask=o_C == 0)


TICKETS: dict[tuple[int, torch.device, int | None], Tensor] = {}


def tickets_for(cut: Cut, device: torch.device) -> Tensor:
    """Zeros, which every launch resets to zero; two streams must not share them.

    Those made while a CUDA graph is captured belong to that graph's memory, and are zero only during its replays, so
    no later launch may find them; a graph uses those that an earlier launch on its stream has made.
    """
    _, groups, of_channels = cut.grid
    number, on_gpu = (groups + 1) * of_channels * (cut.bunches + 1), device.type == "cuda"
    size = 1 << (number - 1).bit_length()
    key = size, device, torch.cuda.current_stream(device).cuda_stream if on_gpu else None
    found = TICKETS.get(key)
    if found is None:
        found = torch.zeros(size, dtype=torch.int32, device=device)
        if not (on_gpu and torch.cuda.is_current_stream_capturing()):
            TICKETS[key] = found
    return found
