"""What the compiler makes of the objective's kernels at every shipped tile shape; needs no GPU."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Iterator

import pytest

if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("needs Triton's compiler: Triton installed, its interpreter off", allow_module_level=True)

from unigrad_fast.benchmarks.counts.compiled import (
    MATRIX_INSTRUCTION,
    SHARED_MEMORY,
    Case,
    Row,
    compile_all,
    dot_cases,
    failure_of,
    row_cases,
)

ARCHITECTURES = (80, 90, 100)
WITH_LITTLE_MEMORY = tuple(each for each in SHARED_MEMORY if each not in ARCHITECTURES)  # they share their tiles
DOTS = ("update_correlation", "correlation_product")
STREAMING = ("unit_embeddings", "embedding_gradient", "lerp", "square_sums", "lars")
TRITON = tuple(int(part) for part in importlib.metadata.version("triton").split(".")[:2])
registers_suffice = pytest.mark.xfail(TRITON < (3, 8), reason="Triton 3.6 spills up to 128 bytes after some products")
every_architecture = pytest.mark.parametrize("architecture", ARCHITECTURES)
with_little_memory = pytest.mark.parametrize("architecture", WITH_LITTLE_MEMORY)


def tells_more(cases: list[Case]) -> list[Case]:
    """Leaves out what compiles to nearly another case's instructions.

    A tile's shape shows in its main variant; further variants are compiled at the smallest tile, odd widths there as
    well, arithmetic without matrix units (and tf32x3, three of tf32) for the architecture with the least shared memory.
    """
    kept: list[Case] = []
    seen: set[tuple] = set()
    for case in cases:
        odd = case.width % 2 == 1
        if case.kernel in ("update", "product"):
            main = case.variant == ("working copy" if case.arithmetic in ("bf16", "fp16") else "no copy")
            if case.arithmetic in ("tf32x3", "ieee"):
                taken = main and not odd and case.architecture == min(ARCHITECTURES)
            elif case.arithmetic == "fp16":
                taken = main and not odd and (case.kernel, case.architecture, "fp16") not in seen
            elif main and not odd:
                taken = True
            else:
                taken = case.arithmetic == "bf16" and (case.kernel, case.architecture, case.variant, odd) not in seen
            if taken:
                seen |= {(case.kernel, case.architecture, case.arithmetic)}
                seen |= {(case.kernel, case.architecture, case.variant, odd)}
        elif case.variant in ("one positive", "10 views"):
            taken = case.arithmetic == "bf16" and case.width == 2048
        elif case.arithmetic == "bf16":
            taken = odd or case.width in (128, 2048, 16384, 32768)
        else:
            taken = case.kernel in ("target", "lars") or case.width in (4096, 16384)
        if taken:
            kept.append(case)
    return kept


def largest_products() -> Iterator[Case]:
    """A product of the largest tile for each card with little shared memory."""
    for case in dot_cases(WITH_LITTLE_MEMORY):
        main = (case.kernel, case.variant, case.arithmetic) == ("product", "working copy", "bf16")
        if main and case.rows >= 1024 and case.width % 2 == 0:
            yield case


@pytest.fixture(
    scope="module", params=[pytest.param(False, id="telling"), pytest.param(True, id="all", marks=pytest.mark.slow)]
)
def rows(request: pytest.FixtureRequest) -> list[Row]:
    """Kernels, compiled: those that tell more than others, or all."""
    if request.param:
        return compile_all([*dot_cases(), *row_cases()])
    return compile_all([*tells_more([*dot_cases(ARCHITECTURES), *row_cases(ARCHITECTURES)]), *largest_products()])


def of(rows: list[Row], architecture: int, names: tuple[str, ...], *arithmetic: str) -> list[Row]:
    """Rows of some kernels whose C divides by 16."""
    found = [
        row
        for row in rows
        if row.case.architecture == architecture
        and row.name in names
        and row.case.arithmetic in (arithmetic or (row.case.arithmetic,))
        and row.case.width % 16 == 0
    ]
    assert found
    return found


@every_architecture
def test_every_kernel_compiles_and_fits_into_shared_memory(rows, architecture, record_property):
    here = [row for row in rows if row.case.architecture == architecture]
    assert {row.name for row in here} == {*DOTS, *STREAMING}
    assert [(row.case, failure) for row in here if (failure := failure_of(row))] == []
    spilling = {f"{row.name}, {row.case.arithmetic}, width {row.case.width}": row.stack for row in here if row.stack}
    record_property("bytes of stack", spilling)


@with_little_memory
def test_kernels_fit_cards_with_little_shared_memory(rows, architecture):
    here = [row for row in rows if row.case.architecture == architecture]
    assert [(row.case, failure) for row in here if (failure := failure_of(row))] == []
    assert {name for row in of(rows, architecture, DOTS, "bf16") for name in row.instructions} == {"mma.sync"}


@registers_suffice
@with_little_memory
def test_matrix_products_keep_everything_in_registers_of_cards_with_little_shared_memory(rows, architecture):
    products = [row for row in of(rows, architecture, DOTS) if row.case.arithmetic in ("bf16", "fp16", "tf32")]
    assert [(row.case, row.tile, row.stack) for row in products if row.stack] == []


@every_architecture
@pytest.mark.parametrize("arithmetic", ["bf16", "fp16", "tf32"])
def test_matrix_products_use_the_matrix_units_of_the_architecture(rows, architecture, arithmetic):
    expected = {MATRIX_INSTRUCTION[architecture]}
    found = of(rows, architecture, DOTS, arithmetic)
    assert [(row.case, row.instructions) for row in found if set(row.instructions) != expected] == []


@registers_suffice
@every_architecture
@pytest.mark.parametrize("arithmetic", ["bf16", "fp16", "tf32"])
def test_matrix_products_keep_everything_in_registers(rows, architecture, arithmetic):
    found = of(rows, architecture, DOTS, arithmetic)
    assert [(row.case, row.tile, row.stack) for row in found if row.stack] == []


@every_architecture
@pytest.mark.parametrize("arithmetic", ["bf16", "fp16", "tf32"])
def test_matrix_products_move_tiles_128_bits_at_a_time(rows, architecture, arithmetic):
    found = of(rows, architecture, DOTS, arithmetic)
    assert [(row.case, row.tile, row.widths) for row in found if row.wide < 1] == []


@registers_suffice
@every_architecture
def test_streaming_kernels_keep_everything_in_registers(rows, architecture):
    assert [(row.case, row.stack) for row in of(rows, architecture, STREAMING) if row.stack] == []


@every_architecture
def test_streaming_kernels_move_rows_128_bits_at_a_time(rows, architecture):
    """128 channels of bf16 are 64 bits for each of a warp's threads, and all of them are."""
    found = of(rows, architecture, ("unit_embeddings", "embedding_gradient"))
    narrow = [(row.case, row.widths) for row in found if row.wide < 1]
    assert [entry for entry in narrow if entry[0].width > 128] == []
    assert {bits for _, widths in narrow for accesses in widths.values() for bits in accesses} <= {64, 128}


@every_architecture
def test_an_odd_width_costs_the_wide_accesses(rows, architecture):
    """What the other tests find is not there by itself: counting sees narrow accesses where they are."""
    odd = [row for row in rows if row.case.architecture == architecture and row.case.width % 2 == 1]
    assert {row.name for row in odd} == {*DOTS, "unit_embeddings", "embedding_gradient"}
    # In TF32 the update reads units transposed, along their 128 rows: those accesses stay wide.
    along_rows = [row for row in odd if row.case.kernel == "update" and row.case.arithmetic.startswith("tf32")]
    assert [(row.case, row.wide) for row in odd if row not in along_rows and row.wide > 0] == []
    assert [(row.case, row.wide) for row in along_rows if row.wide >= 1] == []
