"""What the compiler makes of batch norm's kernels; needs no GPU."""

from __future__ import annotations

import math

import pytest
from ahead_of_time import wide_accesses
from every_kernel import as_launched, settings_of

from unigrad_fast.benchmarks.counts.compiled import resources
from unigrad_fast.kernels.heuristics import NORM_KERNELS, cut

# Tensors of images that are read and written.
IMAGES = {
    "norm_statistics": (1, 0),
    "norm_settle": (0, 0),
    "normalise": (1, 1),
    "normalise_relu": (1, 1),
    "normalise_add": (2, 1),
    "norm_sums": (2, 0),
    "norm_sums_relu": (2, 0),
    "norm_sums_add": (2, 1),
    "norm_sums_twice": (3, 1),
    "norm_sums_pool": (5, 0),  # the gradient from 4 windows
    "norm_gradient_pool": (5, 1),
    "norm_pool": (9, 1),
    "norm_gradient": (2, 1),
    "norm_gradient_relu": (2, 1),
}


@pytest.mark.parametrize("architecture", [80, 90, 100])
@pytest.mark.parametrize("name", IMAGES)
def test_images_move_128_bits_at_a_time_and_registers_suffice(
    name, architecture, tmp_path, monkeypatch, record_property
):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    settings = settings_of(name)
    variant, options = as_launched(name)
    aligned = [each for each in variant.kernel.arg_names if each.startswith("p_") or each == "C"]
    result = variant.compiled(aligned=aligned, architecture=architecture, **options or {"num_warps": 2})
    per_tensor = settings.elements // (32 * settings.warps * 8) if settings else 0  # accesses of 8 bf16
    read, written = IMAGES[name]
    assert wide_accesses(result, "ld") >= read * per_tensor
    assert wide_accesses(result, "st") >= written * per_tensor
    registers, stack = resources(result.asm["cubin"])
    record_property("registers", registers)
    assert stack == 0
    assert registers <= (settings.registers if settings else 64)


@pytest.mark.parametrize("name", NORM_KERNELS)
@pytest.mark.parametrize(("rows", "channels"), [(1_605_632, 64), (401_408, 64), (401_408, 256), (6_272, 2048)])
def test_large_norms_fill_a_card(name, rows, channels):
    """Two groups of 128 images in ResNet-50, on a card of 132 multiprocessors, each with room for 64 warps."""
    settings = NORM_KERNELS[name]
    resident = min(settings.resident, math.prod(cut(rows, 2, channels, settings).grid) / 132)
    assert resident * settings.warps >= 64 * 0.25
    in_flight = resident * settings.elements * (2 if name in ("statistics", "normalise") else 4)
    assert in_flight >= 16 * 1024  # bytes: 2.7 TB/s if each takes 0.8 µs


@pytest.mark.parametrize("channels", [3, 64, 2048])
@pytest.mark.parametrize("rows", [1, 128, 6_272, 1_605_632, 2**30])
@pytest.mark.parametrize("name", [name for name, settings in NORM_KERNELS.items() if settings.parts])
def test_chunks_are_merged_in_at_most_two_steps(name, rows, channels):
    parts = NORM_KERNELS[name].parts
    cuts = cut(rows, 2, channels, NORM_KERNELS[name])
    assert cuts.bunches == math.ceil(cuts.grid[0] / parts) <= parts
