"""What the compiler makes of the passes over many tensors; needs no GPU."""

from __future__ import annotations

import re

import pytest
from ahead_of_time import wide_accesses
from every_kernel import VARIANTS

from unigrad_fast.benchmarks.counts.compiled import resources
from unigrad_fast.kernels.multi_tensor import BLOCK, WARPS

PER_STREAM = BLOCK // (32 * WARPS * 4)  # 128-bit accesses of one thread to one tensor's block


@pytest.mark.parametrize("architecture", [80, 90, 100])
@pytest.mark.parametrize(
    ("name", "read", "written"),
    [("target", 2, 1), ("target_and_copy", 2, 1), ("square_sums", 2, 0), ("lars", 3, 2), ("lars_without_ratio", 3, 2)],
)
def test_blocks_move_128_bits_at_a_time_and_registers_suffice(
    name, read, written, architecture, tmp_path, monkeypatch, record_property
):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    variant = VARIANTS[name]
    pointers = [each for each in variant.kernel.arg_names if "*" in variant.kind(each)]
    result = variant.compiled(aligned=pointers, architecture=architecture, num_warps=WARPS)
    assert wide_accesses(result, "ld") == read * PER_STREAM
    assert wide_accesses(result, "st") == written * PER_STREAM
    if name == "target_and_copy":  # four elements of bf16 are 64 bits
        assert len(re.findall(r"st\.global[\w.:]*\.v2\.b32", result.asm["ptx"])) == PER_STREAM
    registers, stack = resources(result.asm["cubin"])
    record_property("registers", registers)
    assert stack == 0
    assert registers <= 64  # four programs on a multiprocessor
