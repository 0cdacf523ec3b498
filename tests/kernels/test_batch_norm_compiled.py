"""What the compiler makes of batch norm's kernels; needs no GPU."""

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

from unigrad_fast.kernels.batch_norm import (
    PARTS,
    WORD,
    cut,
    gradient_kernel,
    normalise_kernel,
    settle_kernel,
    statistics_kernel,
    sums_kernel,
)

HALF = {"p_x", "p_y", "p_dy", "p_dx", "p_residual", "p_dresidual"}  # bf16
DOUBLE = {"p_count", "p_sums", "p_statistics"}
INTEGER = {"p_mask": "*i32", "p_tickets": "*i32", "p_tracked": "*i64"}


def compiled(kernel, architecture: int, constants: dict, double: set[str], warps: int):
    """The kernel for a GPU that need not be there; channels a multiple of 16."""
    names = kernel.arg_names

    def kind(name: str) -> str:
        if name in constants:
            return "constexpr"
        if name in HALF:
            return "*bf16"
        if name in DOUBLE | double:
            return "*fp64"
        return INTEGER.get(name) or (
            "*fp32" if name.startswith("p_") else "fp32" if name in ("eps", "momentum") else "i32"
        )

    aligned = [i for i, name in enumerate(names) if name.startswith("p_") or name == "C"]
    source = ASTSource(
        kernel,
        {name: kind(name) for name in names},
        constants,
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned if names[i] not in constants},
    )
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options={"num_warps": warps})


TILE = cut(802_816, 2, 64, 1024)
ROWS = {"ROWS": TILE.rows, "COLUMNS": TILE.columns}
NONE = {"p_residual": None, "p_mask": None, "p_dresidual": None}
# Tensors of images that are read and written.
CASES = [
    pytest.param(statistics_kernel, {**ROWS, "PARTS": PARTS}, {"p_parts"}, 1, 0, id="statistics"),
    pytest.param(settle_kernel, {"GROUPS": 2, "COLUMNS": 64}, {"p_parts"}, 0, 0, id="settle"),
    pytest.param(normalise_kernel, {**ROWS, "WORD": WORD, "RELU": False}, set(), 1, 1, id="normalise"),
    pytest.param(normalise_kernel, {**ROWS, "WORD": WORD, "RELU": True}, set(), 1, 1, id="normalise_relu"),
    pytest.param(normalise_kernel, {**ROWS, "WORD": WORD, "RELU": True, "masked": True}, set(), 2, 1, id="add_relu"),
    pytest.param(sums_kernel, {**ROWS, "PARTS": PARTS, "WORD": WORD, "RELU": False}, set(), 2, 0, id="sums"),
    pytest.param(
        sums_kernel,
        {**ROWS, "PARTS": PARTS, "WORD": WORD, "RELU": True, "masked": True},
        set(),
        2,
        0,
        id="sums_add_relu",
    ),
    pytest.param(gradient_kernel, {**ROWS, "WORD": WORD, "RELU": True}, set(), 2, 1, id="gradient_relu"),
    pytest.param(
        gradient_kernel, {**ROWS, "WORD": WORD, "RELU": True, "masked": True}, set(), 2, 2, id="gradient_add_relu"
    ),
]


@pytest.mark.parametrize("architecture", [80, 90, 100])
@pytest.mark.parametrize(("kernel", "constants", "double", "read", "written"), CASES)
def test_images_move_128_bits_at_a_time_and_registers_suffice(
    kernel, constants, double, read, written, architecture, tmp_path, monkeypatch, record_property
):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    constants = dict(constants)
    if not constants.pop("masked", False):
        constants |= {name: None for name in NONE if name in kernel.arg_names}
    warps = 2 if kernel is settle_kernel else 4
    result = compiled(kernel, architecture, constants, double, warps)
    tile = constants.get("ROWS", 0) * constants.get("COLUMNS", 0)
    per_tensor = tile // (32 * warps * 8)  # accesses of 8 bf16
    loads = re.findall(r"ld\.global[\w.:]*\.v4\.b32", result.asm["ptx"])
    stores = re.findall(r"st\.global[\w.:]*\.v4\.b32", result.asm["ptx"])
    assert len(loads) >= read * per_tensor and len(stores) >= written * per_tensor

    binary = tmp_path / "kernel.cubin"
    binary.write_bytes(result.asm["cubin"])
    cuobjdump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    usage = subprocess.run([cuobjdump, "--dump-resource-usage", binary], capture_output=True, text=True, check=True)
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage.stdout).groups()
    record_property("registers", registers)
    print(kernel.__name__, architecture, "registers", registers, "loads", len(loads), "stores", len(stores), per_tensor)
    assert int(stack) == 0
    assert int(registers) <= 128
