"""What the compiler makes of the passes over many tensors; needs no GPU."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from pathlib import Path

import pytest

if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("needs Triton's compiler: Triton installed, its interpreter off", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from unigrad_fast.kernels.multi_tensor import (
    BLOCK,
    MAX_CHUNKS,
    WARPS,
    lars_kernel,
    lerp_kernel,
    square_sums_kernel,
)

TYPES = {"p_chunks": "*i64", "p_addresses": "*i64", "p_skip": "*fp32", "p_sums": "*fp32"}  # all others are fp32
LARS = {"BLOCK": BLOCK, "MAX_CHUNKS": MAX_CHUNKS}
PER_STREAM = BLOCK // (32 * WARPS * 4)  # 128-bit accesses of one thread to one tensor's block


def compiled(kernel, architecture: int, constants: dict):
    """The kernel for a GPU that need not be there; `asm` has PTX and cubin."""
    names = kernel.arg_names
    source = ASTSource(
        kernel,
        {name: "constexpr" if name in constants else TYPES.get(name, "fp32") for name in names},
        constants,
        attrs={(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in TYPES},
    )
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options={"num_warps": WARPS})


@pytest.mark.parametrize("architecture", [80, 90, 100])
@pytest.mark.parametrize(
    ("kernel", "constants", "read", "written"),
    [
        pytest.param(lerp_kernel, {"BLOCK": BLOCK}, 2, 1, id="lerp"),
        pytest.param(square_sums_kernel, {"BLOCK": BLOCK}, 2, 0, id="square_sums"),
        pytest.param(lars_kernel, {**LARS, "ADAPT": True}, 3, 2, id="lars"),
        pytest.param(lars_kernel, {**LARS, "ADAPT": False}, 3, 2, id="lars_without_ratio"),
    ],
)
def test_blocks_move_128_bits_at_a_time_and_registers_suffice(
    kernel, constants, read, written, architecture, tmp_path, monkeypatch, record_property
):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    result = compiled(kernel, architecture, constants)
    assert len(re.findall(r"ld\.global[\w.:]*\.v4", result.asm["ptx"])) == read * PER_STREAM
    assert len(re.findall(r"st\.global[\w.:]*\.v4", result.asm["ptx"])) == written * PER_STREAM

    binary = tmp_path / "kernel.cubin"
    binary.write_bytes(result.asm["cubin"])
    cuobjdump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    usage = subprocess.run([cuobjdump, "--dump-resource-usage", binary], capture_output=True, text=True, check=True)
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage.stdout).groups()
    record_property("registers", registers)
    assert int(stack) == 0
    assert int(registers) <= 64  # four programs on a multiprocessor
