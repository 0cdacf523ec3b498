"""Kernels as Triton specialises them to integer arguments and to cards; needs no GPU.

Triton makes an integer argument that is 1 a constant, and takes multiples of 16 apart from other integers.
"""

from __future__ import annotations

import pytest
from every_kernel import VARIANTS, Variant, as_launched

from unigrad_fast.benchmarks.counts.compiled import SHARED_MEMORY

NORM = [variant for name, variant in VARIANTS.items() if "norm" in name]


@pytest.fixture(autouse=True)
def fresh_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("variant", NORM, ids=str)
def test_batch_norm_compiles_for_one_row_of_one_channel(variant: Variant):
    variant.compiled(ones=variant.integers)


@pytest.mark.slow  # above, those whose integers are often 1
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=str)
def test_every_kernel_compiles_if_any_integer_is_one_or_a_multiple_of_16(variant: Variant):
    plain = set(variant.integers) - {"strides"}
    variant.compiled(ones=variant.integers)
    variant.compiled(aligned=plain)
    for name in variant.integers:
        variant.compiled(ones=[name], aligned=plain - {name})
        variant.compiled(ones=[other for other in variant.integers if other != name], aligned=plain & {name})


@pytest.mark.slow  # tests/kernels/test_compiled.py has a product for each
@pytest.mark.parametrize("architecture", SHARED_MEMORY)
def test_every_kernel_compiles_for_every_card_and_fits_into_its_shared_memory(architecture):
    for name in VARIANTS:
        variant, options = as_launched(name)
        result = variant.compiled(architecture=architecture, **options)
        assert result.asm["cubin"] and result.metadata.shared <= SHARED_MEMORY[architecture] * 1024, name
