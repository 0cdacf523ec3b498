"""Passes over many tensors at once: the momentum target's update and LARS.

    target  θ' ← momentum · θ' + (1 − momentum) · θ, and a copy in fp16 or bf16; unchanged where `skip` is not 0

    LARS    u  = scale · grad + weight_decay · w
            t  = trust_coefficient · ‖w‖ / ‖u‖, 1 where either norm is 0
            v ← momentum · v + t · u
            w ← w − lr · v, both unchanged where `skip` is not 0

These passes are bound by memory traffic. Bytes per fp32 parameter: target 12 (read θ', θ; write θ'), 14 with its copy,
in one launch; LARS 8 for the norms (read w, grad) and 20 for the rest (read w, grad, v; write w, v) in two launches.
`torch._foreach_lerp_` also reaches 12 if the host knows the weight; with a weight on the device it launches one kernel
per tensor. LARS written with `torch._foreach` moves 52 bytes, and launches one kernel per tensor for t · u.

Tensors are cut into chunks, one program each; a table on the device gives the location of each chunk. Elements are
processed in groups of four, in 128-bit accesses, except for up to three at a tensor's end. Sums of squares are computed
chunk by chunk and then added in a fixed order, so that two runs are bitwise equal.

The learning rate and the target's momentum change from step to step. They are read on the device, so that a replayed
CUDA graph uses the current values.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from unigrad_fast.kernels.torch_private import FakeTensor

CHUNK = 16384  # elements per program; ResNet-50 with its projector has about 2,300 chunks
MAX_CHUNKS = 1024  # per tensor, because each of its programs adds up all their sums; larger tensors get larger chunks
BLOCK = 2048  # elements at a time
WARPS = 8
LOW_PRECISION = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@triton.jit
def load_chunk(p_chunks):
    """Index of this program's tensor, and in it the chunk's first element, its end, and the end of its groups of 4."""
    p_chunk = p_chunks + tl.program_id(0).to(tl.int64) * 5
    tensor, first, last = tl.load(p_chunk), tl.load(p_chunk + 1), tl.load(p_chunk + 2)  # scalars
    return tensor, tl.multiple_of(first, 16), last, last // 4 * 4


@triton.jit
def load_pointer(p_addresses, position):
    return tl.multiple_of(tl.load(p_addresses + position).to(tl.pointer_type(tl.float32)), 16)  # scalar


@triton.jit
def lerp_block(p_target, p_online, p_copy, o, m, weight, has_copy, DTYPE: tl.constexpr):
    b_target = tl.load(p_target + o, mask=m, other=0)  # [BLOCK] or [4]
    b_online = tl.load(p_online + o, mask=m, other=0)  # [BLOCK] or [4]
    b_difference = b_online - b_target
    # Computed from the nearer end, as in torch: a weight of 1 gives the online parameter exactly.
    b_lerp = tl.where(weight < 0.5, b_target + weight * b_difference, b_online - b_difference * (1 - weight))
    tl.store(p_target + o, b_lerp, mask=m)
    if DTYPE is not None:
        tl.store(p_copy + o, b_lerp.to(DTYPE), mask=m & has_copy)


@triton.jit
def lerp_kernel(p_chunks, p_addresses, p_copies, p_skip, p_momentum, copies, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    if tl.load(p_skip) == 0:  # scalar
        weight = (1 - tl.load(p_momentum).to(tl.float64)).to(tl.float32)  # scalar
        tensor, first, last, rest = load_chunk(p_chunks)
        p_target, p_online = load_pointer(p_addresses, tensor * 2), load_pointer(p_addresses, tensor * 2 + 1)
        has_copy, p_copy = tensor < copies, p_target
        if DTYPE is not None:
            address = tl.load(p_copies + tensor, mask=has_copy, other=0)  # scalar
            p_copy = tl.multiple_of(address.to(tl.pointer_type(DTYPE)), 16)
        for start in range(first, rest, BLOCK):
            o = start + tl.arange(0, BLOCK)
            lerp_block(p_target, p_online, p_copy, o, o < rest, weight, has_copy, DTYPE)
        o = rest + tl.arange(0, 4)
        lerp_block(p_target, p_online, p_copy, o, o < last, weight, has_copy, DTYPE)


def lerp_(
    targets: Sequence[Tensor], onlines: Sequence[Tensor], copies: Sequence[Tensor], momentum: Tensor, skip: Tensor
) -> None:
    """target ← momentum · target + (1 − momentum) · online, in place, in one launch.

    Args:
        targets, onlines: pairs that `split` accepts.
        copies: copies of the first targets, written too; same layout, all in fp16 or all in bf16.
        momentum: share of the targets, 0 to 1; fp32 or float64 scalar on their device.
        skip: scalar on the same device; if it is not 0, targets and copies stay bitwise unchanged.
    """
    chunks, addresses = chunk_table(targets), address_table(targets, onlines)
    with torch.cuda.device_of(skip):
        lerp_kernel[(len(chunks),)](
            chunks,
            addresses,
            address_table(copies) if copies else None,
            skip,
            momentum,
            len(copies),
            DTYPE=LOW_PRECISION[copies[0].dtype] if copies else None,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    torch.autograd.graph.increment_version([*targets, *copies])


@triton.jit
def load_update(p_weight, p_gradient, o, m, weight_decay, scale):
    b_weight = tl.load(p_weight + o, mask=m, other=0)  # [BLOCK] or [4]
    b_gradient = tl.load(p_gradient + o, mask=m, other=0)  # [BLOCK] or [4]
    return b_weight, scale * b_gradient + weight_decay * b_weight


@triton.jit
def square_sums_kernel(p_chunks, p_addresses, p_sums, p_scale, weight_decay, BLOCK: tl.constexpr):
    tensor, first, last, rest = load_chunk(p_chunks)
    p_weight, p_gradient = load_pointer(p_addresses, tensor * 3), load_pointer(p_addresses, tensor * 3 + 1)
    scale = 1.0
    if p_scale is not None:
        scale = tl.load(p_scale)
    b_weight_sum, b_update_sum = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(first, rest, BLOCK):
        o = start + tl.arange(0, BLOCK)
        b_weight, b_update = load_update(p_weight, p_gradient, o, o < rest, weight_decay, scale)
        b_weight_sum += b_weight * b_weight
        b_update_sum += b_update * b_update
    o = rest + tl.arange(0, 4)
    b_weight, b_update = load_update(p_weight, p_gradient, o, o < last, weight_decay, scale)
    p_sum = p_sums + tl.program_id(0).to(tl.int64) * 2
    tl.store(p_sum, tl.sum(b_weight_sum) + tl.sum(b_weight * b_weight))
    tl.store(p_sum + 1, tl.sum(b_update_sum) + tl.sum(b_update * b_update))


@triton.jit
def trust_ratio(p_chunks, p_sums, trust_coefficient, MAX_CHUNKS: tl.constexpr):
    p_chunk = p_chunks + tl.program_id(0).to(tl.int64) * 5
    o = tl.load(p_chunk + 3) + tl.arange(0, MAX_CHUNKS)
    m = o < tl.load(p_chunk + 4)  # this tensor's chunks
    weight_norm = tl.sqrt(tl.sum(tl.load(p_sums + o * 2, mask=m, other=0)))  # [MAX_CHUNKS]
    update_norm = tl.sqrt(tl.sum(tl.load(p_sums + o * 2 + 1, mask=m, other=0)))  # [MAX_CHUNKS]
    return tl.where((weight_norm > 0) & (update_norm > 0), trust_coefficient * weight_norm / update_norm, 1.0)


@triton.jit
def lars_block(p_weight, p_gradient, p_velocity, o, m, ratio, lr, momentum, weight_decay, scale):
    b_weight, b_update = load_update(p_weight, p_gradient, o, m, weight_decay, scale)
    b_velocity = momentum * tl.load(p_velocity + o, mask=m, other=0) + ratio * b_update  # [BLOCK] or [4]
    tl.store(p_velocity + o, b_velocity, mask=m)
    tl.store(p_weight + o, b_weight - lr * b_velocity, mask=m)


@triton.jit
def lars_kernel(
    p_chunks,
    p_addresses,
    p_sums,
    p_skip,
    p_scale,
    p_lr,
    momentum,
    weight_decay,
    trust_coefficient,
    ADAPT: tl.constexpr,
    MAX_CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    skip = 0.0
    if p_skip is not None:
        skip = tl.load(p_skip)
    if skip == 0:
        scale = 1.0
        if p_scale is not None:
            scale = tl.load(p_scale)
        lr = tl.load(p_lr).to(tl.float32)  # scalar
        tensor, first, last, rest = load_chunk(p_chunks)
        p_weight, p_gradient = load_pointer(p_addresses, tensor * 3), load_pointer(p_addresses, tensor * 3 + 1)
        p_velocity = load_pointer(p_addresses, tensor * 3 + 2)
        ratio = 1.0
        if ADAPT:
            ratio = trust_ratio(p_chunks, p_sums, trust_coefficient, MAX_CHUNKS)
        for start in range(first, rest, BLOCK):
            o = start + tl.arange(0, BLOCK)
            lars_block(p_weight, p_gradient, p_velocity, o, o < rest, ratio, lr, momentum, weight_decay, scale)
        o = rest + tl.arange(0, 4)
        lars_block(p_weight, p_gradient, p_velocity, o, o < last, ratio, lr, momentum, weight_decay, scale)


def lars_(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    velocities: Sequence[Tensor],
    lr: Tensor,
    momentum: float,
    weight_decay: float,
    trust_coefficient: float,
    adapt: bool,
    skip: Tensor | None = None,
    scale: Tensor | None = None,
) -> None:
    """One step of LARS: updates weights and velocities in place, in two launches, without `adapt` in one.

    Args:
        weights, gradients, velocities: triples that `split` accepts.
        lr: fp32 or float64 scalar on their device.
        skip: scalar on the same device; if it is not 0, everything stays bitwise unchanged.
        scale: fp32 scalar on the same device that gradients are multiplied by.
    """
    chunks, addresses = chunk_table(weights), address_table(weights, gradients, velocities)
    grid = (len(chunks),)
    sums = torch.empty(len(chunks), 2, dtype=torch.float32, device=chunks.device)
    momentum, weight_decay = float(momentum), float(weight_decay)
    with torch.cuda.device_of(chunks):
        if adapt:
            square_sums_kernel[grid](chunks, addresses, sums, scale, weight_decay, BLOCK=BLOCK, num_warps=WARPS)
        lars_kernel[grid](
            chunks,
            addresses,
            sums,
            skip,
            scale,
            lr,
            momentum,
            weight_decay,
            float(trust_coefficient),
            ADAPT=adapt,
            MAX_CHUNKS=MAX_CHUNKS,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    torch.autograd.graph.increment_version([*weights, *velocities])


def split(rows: Sequence[tuple[Tensor, ...]]) -> tuple[list, list]:
    """Split rows, each with the tensors of one parameter, into those that the kernels accept and the others.

    The kernels accept non-empty fp32 tensors on one device, aligned to 16 bytes and dense, with the same memory layout
    for all tensors of a row, so that an element has the same offset in each of them.
    """
    taken, others = [], []
    for row in rows:
        (taken if _fits(row, rows[0][0].device) else others).append(row)
    return taken, others


def _fits(row: tuple[Tensor, ...], device: torch.device) -> bool:
    shape = row[0].shape
    layout = torch.contiguous_format if row[0].is_contiguous() else torch.channels_last
    for tensor in row:
        if tensor.dtype != torch.float32 or tensor.device != device or tensor.shape != shape:
            return False
        # A fake tensor has no address; its storage counts as aligned.
        address = tensor.storage_offset() * 4 if isinstance(tensor, FakeTensor) else tensor.data_ptr()
        if address % 16 or not tensor.is_contiguous(memory_format=layout):
            return False
    return shape.numel() > 0


def chunk_table(tensors: Sequence[Tensor]) -> Tensor:
    """int64 [chunks, 5]: index of the chunk's tensor, the chunk's first element and end in it, and the indices of the
    tensor's first chunk and of the end of its chunks."""
    return _chunk_table(tuple(t.numel() for t in tensors), tensors[0].device)


@functools.lru_cache(maxsize=16)
def _chunk_table(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    rows = []
    for number, size in enumerate(sizes):
        length = max(CHUNK, triton.next_power_of_2(triton.cdiv(size, MAX_CHUNKS)))
        firsts = range(0, size, length)
        chunks = (len(rows), len(rows) + len(firsts))
        rows += [(number, first, min(first + length, size), *chunks) for first in firsts]
    return torch.tensor(rows, dtype=torch.int64, device="cpu").to(device)


def address_table(*tensors: Sequence[Tensor]) -> Tensor:
    """int64 [tensors · lists]: data addresses of the first tensor of each list, then of the second, and so on."""
    addresses = tuple(t.data_ptr() for row in zip(*tensors, strict=True) for t in row)
    device = tensors[0][0].device
    if _awaiting is not None:
        _awaiting.append((torch.empty(len(addresses), dtype=torch.int64, device=device), addresses))
        return _awaiting[-1][0]
    # Parameters stay in place and most gradients come back to the same addresses, so the table is rarely copied. The
    # cache key includes the stream, because another stream could read the table before its copy has finished.
    return _address_table(addresses, device, torch.cuda.current_stream(device) if device.type == "cuda" else None)


@functools.lru_cache(maxsize=64)
def _address_table(addresses: tuple[int, ...], device: torch.device, stream) -> Tensor:
    table = torch.tensor(addresses, dtype=torch.int64, device="cpu")
    if device.type == "cuda":
        table = table.pin_memory()  # otherwise the host would wait
    return table.to(device, non_blocking=True)


Tables = list[tuple[Tensor, tuple[int, ...]]]  # tables on the device, each with the addresses to write to it
_awaiting: Tables | None = None  # tables of the CUDA graph being captured


@contextlib.contextmanager
def captured_tables() -> Iterator[Tables]:
    """A context for capturing a CUDA graph: address tables stay empty in it, and `fill` writes them afterwards.

    If they were copied during capture, every replay would repeat the copy, from host memory that has been reused by
    then. The tables must live as long as the graph.
    """
    global _awaiting
    _awaiting = tables = []
    try:
        yield tables
    finally:
        _awaiting = None


def fill(tables: Tables) -> None:
    """Write the address tables of a captured graph; the host waits."""
    for table, addresses in tables:
        table.copy_(torch.tensor(addresses, dtype=torch.int64, device="cpu"))
