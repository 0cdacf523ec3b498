"""What the compiler makes of products between two norms; needs no GPU."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from ahead_of_time import wide_accesses
from every_kernel import VARIANTS

from unigrad_fast.benchmarks.counts.compiled import MATRIX_INSTRUCTION, SHARED_MEMORY, resources
from unigrad_fast.kernels.heuristics import architecture, norm_product_for, tiled

OF_MULTIPROCESSOR = {80: 164, 86: 100, 89: 100, 90: 228, 100: 228, 120: 100}  # KiB of shared memory
RESERVED = 1  # KiB for each program
NAMES = ("norm_product", "norm_product_normalising")


def settings_of(name: str, capability: int):
    return norm_product_for(architecture(divmod(capability, 10)), name == "norm_product_normalising")


@pytest.mark.parametrize("channels", [64, 256])
@pytest.mark.parametrize("capability", [80, 90, 100, pytest.param(86, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", NAMES)
def test_products_use_matrix_units_and_registers_and_memory_suffice(
    name, capability, channels, tmp_path, monkeypatch, record_property
):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    settings = settings_of(name, capability)
    cuts = tiled(802_816, 2, channels, settings)
    shape = {"ROWS": cuts.rows, "COLUMNS": cuts.columns, "DEPTH": settings.tile.depth}
    shape |= {"BUNCH": settings.bunch, "PARTS": settings.parts}
    variant = replace(VARIANTS[name], constants={**VARIANTS[name].constants, **shape})
    aligned = [each for each in variant.kernel.arg_names if each.startswith("p_") or each in ("C", "K")]
    result = variant.compiled(aligned=aligned, architecture=capability, **settings.options)
    assert MATRIX_INSTRUCTION[capability] in result.asm["ptx"]
    assert wide_accesses(result, "st") >= cuts.rows * cuts.columns // (32 * settings.tile.warps * 8)
    registers, stack = resources(result.asm["cubin"])
    record_property("registers", registers)
    assert stack == 0 and registers <= settings.registers
    shared = result.metadata.shared / 1024
    assert shared <= SHARED_MEMORY[capability]
    assert settings.resident * (shared + RESERVED) <= OF_MULTIPROCESSOR[capability]


@pytest.mark.parametrize("capability", OF_MULTIPROCESSOR)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("rows", "channels"), [(401_408, 64), (401_408, 256), (25_088, 1024), (6_272, 2048)])
def test_products_fill_a_card(name, capability, rows, channels):
    """Two groups of 128 images in ResNet-50, on a card of 132 multiprocessors."""
    settings = settings_of(name, capability)
    programs = math.prod(tiled(rows, 2, channels, settings).grid)
    assert programs >= 132 * settings.resident and settings.resident >= 2
