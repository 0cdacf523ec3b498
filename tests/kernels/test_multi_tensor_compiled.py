"""What the compiler makes of the passes over many tensors; needs no GPU."""

from __future__ import annotations

import re

import pytest
import triton.language as tl
from ahead_of_time import compiled, wide_accesses

from unigrad_fast.benchmarks.counts.compiled import resources
from unigrad_fast.kernels.multi_tensor import (
    BLOCK,
    MAX_CHUNKS,
    WARPS,
    lars_kernel,
    lerp_kernel,
    square_sums_kernel,
)

# All others are fp32.
TYPES = {
    "p_chunks": "*i64", "p_addresses": "*i64", "p_copies": "*i64", "p_skip": "*fp32", "p_scale": "*fp32",
    "p_sums": "*fp32", "p_lr": "*fp64", "p_momentum": "*fp64", "copies": "i32",
}  # fmt: skip
LARS = {"BLOCK": BLOCK, "MAX_CHUNKS": MAX_CHUNKS}
PER_STREAM = BLOCK // (32 * WARPS * 4)  # 128-bit accesses of one thread to one tensor's block


@pytest.mark.parametrize("architecture", [80, 90, 100])
@pytest.mark.parametrize(
    ("kernel", "constants", "read", "written"),
    [
        pytest.param(lerp_kernel, {"BLOCK": BLOCK, "DTYPE": None, "p_copies": None}, 2, 1, id="lerp"),
        pytest.param(lerp_kernel, {"BLOCK": BLOCK, "DTYPE": tl.bfloat16}, 2, 1, id="lerp_and_copy"),
        pytest.param(square_sums_kernel, {"BLOCK": BLOCK}, 2, 0, id="square_sums"),
        pytest.param(lars_kernel, {**LARS, "ADAPT": True}, 3, 2, id="lars"),
        pytest.param(lars_kernel, {**LARS, "ADAPT": False}, 3, 2, id="lars_without_ratio"),
    ],
)
def test_blocks_move_128_bits_at_a_time_and_registers_suffice(
    kernel, constants, read, written, architecture, tmp_path, monkeypatch, record_property
):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    names = [name for name in kernel.arg_names if TYPES.get(name, "").startswith("*")]
    result = compiled(kernel, architecture, constants, lambda name: TYPES.get(name, "fp32"), names, WARPS)
    assert wide_accesses(result, "ld") == read * PER_STREAM
    assert wide_accesses(result, "st") == written * PER_STREAM
    if constants.get("DTYPE"):  # four elements of bf16 are 64 bits
        assert len(re.findall(r"st\.global[\w.:]*\.v2\.b32", result.asm["ptx"])) == PER_STREAM
    registers, stack = resources(result.asm["cubin"])
    record_property("registers", registers)
    assert stack == 0
    assert registers <= 64  # four programs on a multiprocessor
