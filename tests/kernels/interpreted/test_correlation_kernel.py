"""The update of F, whole and in blocks of rows, against float64; Triton runs in its interpreter."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from formulas import error, random, unit
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from triton.runtime.interpreter import InterpreterBuilder

from unigrad_fast.kernels import correlation as kernel
from unigrad_fast.kernels import mirror_, update_correlation_
from unigrad_fast.kernels.heuristics import TRIANGLE, Tile, working_scale

pytestmark = pytest.mark.usefixtures("poisoned")
GATES = {torch.float32: 1e-6, torch.float16: 1e-3}
# Tiles of every relation to TRIANGLE: several, one or half of one in a block, and depths that M divides or does not.
TILES = [Tile(32, 32, 16, 1, 1), Tile(64, 64, 32, 1, 1), Tile(128, 128, 64, 1, 1)]


@pytest.fixture(params=TILES, ids=lambda tile: f"tile{tile.rows}")
def tile(request, monkeypatch):
    monkeypatch.setattr(kernel, "tile_for", lambda *_: request.param)


def units(rows: int, width: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return unit(random(rows, width, seed=seed), dtype)


def moment(units_MC: torch.Tensor) -> torch.Tensor:
    return units_MC.double().T @ units_MC.double() / len(units_MC)


def lower_blocks(width: int) -> torch.Tensor:
    """Where F is not kept up: blocks of TRIANGLE rows and columns below the diagonal."""
    block = torch.arange(width) // TRIANGLE
    return block[:, None] > block[None, :]


@pytest.mark.parametrize(
    ("rows", "width", "dtype"),
    [(1, 8, torch.float16), (16, 32, torch.float32), (67, 70, torch.float16), (5, 150, torch.float32)],
)
def test_the_correlation_is_the_moving_average(rows, width, dtype, tile):
    first, second = units(rows, width, dtype), units(rows, width, dtype, seed=1)
    correlation = torch.full((width, width), torch.nan)
    for batch, decay in ((first, 0.0), (second, 0.9)):
        update_correlation_(correlation, batch, decay=decay, count=rows)
    expected = 0.9 * moment(first) + 0.1 * moment(second)
    plain = 0.9 * (first.float().T @ first.float() / rows) + 0.1 * (second.float().T @ second.float() / rows)
    assert error(correlation, expected) < min(1e-6, 1.5 * error(plain, expected) + 1e-7)
    assert torch.equal(correlation, correlation.T)


@settings(deadline=None, max_examples=3, phases=[Phase.generate])  # the interpreter is too slow to shrink
@given(rows=st.integers(1, 60), width=st.integers(8, 150), decay=st.floats(0, 0.999), seed=st.integers(0, 99))
def test_the_correlation_stays_symmetric_and_positive_with_trace_one(rows, width, decay, seed):
    correlation = torch.full((width, width), torch.nan)
    for step in range(2):
        batch = units(rows, width, seed=seed + 1000 * step)
        update_correlation_(correlation, batch, decay=decay * step, count=rows)
    assert torch.equal(correlation, correlation.T)
    assert correlation.trace().item() == pytest.approx(1, rel=1e-5)
    assert torch.linalg.eigvalsh(correlation.double()).min() > -1e-6


def test_decay_and_count_may_be_scalars_on_the_device_that_change_from_step_to_step():
    decay, count = torch.zeros(()), torch.tensor(12.0)
    correlation, expected = torch.zeros(40, 40), torch.zeros(40, 40).double()
    for step, value in enumerate((0.5, 0.9, 0.99)):
        decay.fill_(value)
        batch = units(6, 40, seed=step)
        update_correlation_(correlation, batch, decay=decay, count=count)
        expected = value * expected + (1 - value) * moment(batch) / 2  # 12 rows over all ranks, of which 6 are here
    assert error(correlation, expected) < 1e-6


@pytest.mark.parametrize("precision", ["ieee", "tf32"])  # tf32 takes the units transposed; here its sums are exact
@pytest.mark.parametrize(
    "layout",
    [
        lambda u: torch.cat([u, u], dim=1)[:, : u.shape[1]],
        lambda u: u.repeat_interleave(2, dim=0)[::2],
        lambda u: u.T.contiguous().T,
        lambda u: u[:1].expand(u.shape),
    ],
    ids=["wider", "every second row", "transposed", "expanded"],
)
def test_every_stride_of_the_units_is_followed(layout, precision):
    batch = layout(units(9, 70))
    correlation, expected = torch.zeros(2, 70, 70)
    update_correlation_(correlation, batch, decay=0.0, count=9, input_precision=precision)
    update_correlation_(expected, batch.contiguous(), decay=0.0, count=9, input_precision=precision)
    assert torch.equal(correlation, expected)
    assert error(correlation, moment(batch)) < 1e-6


@pytest.mark.parametrize("flags", [1, 1024, 2500])
@pytest.mark.parametrize("dtype", GATES)
def test_a_skipped_update_leaves_the_correlation_bitwise_unchanged(flags, dtype):
    correlation = random(40, 40, dtype=torch.float32)
    correlation = correlation + correlation.T
    correlation[0, 0] = -0.0
    before = correlation.clone()
    working = None if dtype == torch.float32 else (correlation * working_scale(dtype, 40)).to(dtype)
    working_before = None if working is None else working.clone()
    for position in {0, flags - 1}:
        skip = torch.zeros(flags, dtype=torch.int32)
        skip[position] = 1
        batch = torch.full((6, 40), torch.nan, dtype=dtype)
        update_correlation_(correlation, batch, decay=0.0, count=6, skip=skip, updates=torch.tensor(0), working=working)
    assert torch.equal(correlation.view(torch.int32), before.view(torch.int32))
    assert working is None or torch.equal(working.view(torch.int16), working_before.view(torch.int16))


def test_lowered_flags_let_the_update_through():
    correlation, expected = torch.zeros(2, 40, 40)
    skip = torch.zeros(3, 700, dtype=torch.int32)
    update_correlation_(correlation, units(6, 40), decay=0.0, count=6, skip=skip)
    update_correlation_(expected, units(6, 40), decay=0.0, count=6)
    assert torch.equal(correlation, expected) and correlation.any()


@pytest.mark.parametrize("dtype", GATES)
def test_the_first_update_does_not_read_what_the_correlation_held(dtype):
    batch = units(6, 40, dtype)
    correlation = torch.full((40, 40), torch.nan)
    updates = torch.zeros((), dtype=torch.int64)
    update_correlation_(correlation, batch, decay=0.9, count=6, updates=updates)
    assert error(correlation, moment(batch)) < 1e-6
    assert updates == 0  # counted with the gradient
    updates += 1
    second = units(6, 40, dtype, seed=1)
    update_correlation_(correlation, second, decay=0.9, count=6, updates=updates)
    assert error(correlation, 0.9 * moment(batch) + 0.1 * moment(second)) < 1e-6


@pytest.mark.parametrize(
    ("cuts", "dtype"),
    [((0, 35, 70), torch.float16), ((0, 1, 14, 69, 70), torch.float32), ((0, 64, 70), torch.float16)],
)
def test_blocks_of_rows_make_up_the_whole(cuts, dtype, tile):
    batches = [units(9, 70, dtype, seed=seed) for seed in range(2)]
    whole = torch.full((70, 70), torch.nan)
    blocks = [torch.full((last - first, 70), torch.nan) for first, last in pairwise(cuts)]
    for step, batch in enumerate(batches):
        update_correlation_(whole, batch, decay=0.8 * step, count=9)
        for first, block in zip(cuts, blocks, strict=False):
            update_correlation_(block, batch, decay=0.8 * step, count=9, first_row=first)
    assert error(torch.cat(blocks), whole) < 1e-6
    assert error(torch.cat(blocks), 0.8 * moment(batches[0]) + 0.2 * moment(batches[1])) < 1e-6


@pytest.mark.parametrize("width", [40, TRIANGLE, 2 * TRIANGLE + 7])
def test_with_a_working_copy_the_upper_triangle_of_blocks_is_written_and_nothing_else(width, tile):
    lower = lower_blocks(width)
    batches = [units(6, width, torch.float16, seed=seed) for seed in range(2)]
    correlation, working = torch.full((width, width), 7.0), torch.full((width, width), 7.0, dtype=torch.float16)
    for step, batch in enumerate(batches):
        update_correlation_(correlation, batch, decay=0.5 * step, count=6, working=working)
    assert (correlation[lower] == 7).all() and (working[lower] == 7).all()
    expected = 0.5 * moment(batches[0]) + 0.5 * moment(batches[1])
    assert error(correlation[~lower], expected[~lower]) < 1e-6
    scaled = correlation * working_scale(torch.float16, width)
    assert torch.equal(working[~lower], scaled.half()[~lower])
    mirror_(correlation)
    assert torch.equal(correlation, correlation.T) and error(correlation, expected) < 1e-6


def test_a_block_of_rows_keeps_all_of_its_working_copy():
    batch = units(20, 150, torch.float16)
    correlation = torch.full((30, 150), torch.nan)
    working = torch.full((30, 150), torch.nan, dtype=torch.float16)
    update_correlation_(correlation, batch, decay=0.0, count=20, first_row=100, working=working)
    assert torch.equal(working, (correlation * working_scale(torch.float16, 150)).half())
    assert error(correlation, moment(batch)[100:130]) < 1e-6


@pytest.mark.parametrize("width", [1, 40, 64, 131])
def test_mirroring_fills_the_lower_triangle_from_the_upper_and_nothing_else(width):
    memory = torch.full((width * width + 128,), 5.0)
    matrix = memory[64:-64].view(width, width)
    matrix.copy_(random(width, width))
    expected = matrix.triu() + matrix.triu(1).T
    matrix[torch.ones(width, width, dtype=torch.bool).tril(-1)] = torch.nan
    version = matrix._version
    assert mirror_(matrix) is matrix and matrix._version > version
    assert torch.equal(matrix, expected)
    assert (memory[:64] == 5).all() and (memory[-64:] == 5).all()


def test_no_byte_outside_the_correlation_is_written(tile):
    memory = torch.full((70 * 70 + 128,), 5.0)
    correlation = memory[64:-64].view(70, 70)
    update_correlation_(correlation, units(9, 70), decay=0.0, count=9)
    assert error(correlation, moment(units(9, 70))) < 1e-6
    assert (memory[:64] == 5).all() and (memory[-64:] == 5).all()


@triton.jit
def upper_tile_kernel(p_index, p_row, p_column, count, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row, column = kernel.upper_tile(tl.load(p_index + o, mask=o < count, other=0))
    tl.store(p_row + o, row, mask=o < count)
    tl.store(p_column + o, column, mask=o < count)


@pytest.mark.parametrize("toward", [None, 0.0, np.inf], ids=["exact", "below", "above"])
def test_every_tile_of_the_upper_triangle_is_counted_once_however_the_root_is_rounded(toward, monkeypatch):
    def root(builder, x):
        return builder.unary_op(
            x, lambda a: np.sqrt(a) if toward is None else np.nextafter(np.sqrt(a), np.float32(toward))
        )

    monkeypatch.setattr(InterpreterBuilder, "create_sqrt", root)  # a GPU's may be one off in its last bit
    side = 4096  # tiles of 32 in 131,072 channels; from some 2,000 on their numbers exceed the 24 bits of fp32
    column = torch.arange(side)
    start = column * (column + 1) // 2
    # The first and the last tiles of each column: where the column changes, a rounded root goes wrong.
    pairs = [(torch.minimum(column, torch.tensor(i)), column) for i in range(3)]
    pairs += [(column - torch.minimum(column, torch.tensor(i)), column) for i in range(3)]
    expected_row, expected_column = (torch.cat(each).int() for each in zip(*pairs, strict=True))
    index = (torch.cat([start] * len(pairs)) + expected_row).int()
    found_row, found_column = torch.empty_like(index), torch.empty_like(index)
    upper_tile_kernel[(triton.cdiv(len(index), 4096),)](index, found_row, found_column, len(index), BLOCK=4096)
    assert torch.equal(found_row, expected_row) and torch.equal(found_column, expected_column)


def test_two_runs_are_bitwise_equal():
    results = []
    for _ in range(2):
        correlation = torch.full((100, 100), torch.nan)
        update_correlation_(correlation, units(40, 100), decay=0.0, count=40)
        results.append(correlation)
    assert torch.equal(*results)
