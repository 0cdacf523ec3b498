"""What the compiler makes of batch norm's kernels; needs no GPU."""

from __future__ import annotations

import pytest
from ahead_of_time import compiled, wide_accesses

from unigrad_fast.benchmarks.counts.compiled import resources
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


def kind(name: str, double: set[str]) -> str:
    """The Triton type of an argument."""
    if name in HALF:
        return "*bf16"
    if name in DOUBLE | double:
        return "*fp64"
    if name in INTEGER:
        return INTEGER[name]
    return "*fp32" if name.startswith("p_") else "fp32" if name in ("eps", "momentum") else "i32"


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
    aligned = [name for name in kernel.arg_names if name.startswith("p_") or name == "C"]
    result = compiled(kernel, architecture, constants, lambda name: kind(name, double), aligned, warps)
    tile = constants.get("ROWS", 0) * constants.get("COLUMNS", 0)
    per_tensor = tile // (32 * warps * 8)  # accesses of 8 bf16
    assert wide_accesses(result, "ld") >= read * per_tensor
    assert wide_accesses(result, "st") >= written * per_tensor
    registers, stack = resources(result.asm["cubin"])
    record_property("registers", registers)
    assert stack == 0
    assert registers <= 128
