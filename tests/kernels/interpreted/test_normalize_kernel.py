"""Unit embeddings and inverse norms against float64; Triton runs in its interpreter."""

from __future__ import annotations

import pytest
import torch
from formulas import error, random, unit
from sent_rows import SENT, check_sent_rows

from unigrad_fast.kernels import unit_embeddings
from unigrad_fast.kernels.heuristics import MAX_WIDTH

pytestmark = pytest.mark.usefixtures("poisoned")
GATES = {torch.float32: 1e-6, torch.float16: 1e-3}
SIZES = [(1, 8), (1, 300), (5, 40), (12, 129), (2, 1000)]


def flags(count: int) -> torch.Tensor:
    return torch.full((count,), -9, dtype=torch.int32)


@pytest.mark.parametrize("dtype", GATES)
@pytest.mark.parametrize("views", [1, 2, 4, 8])
@pytest.mark.parametrize(("images", "width"), SIZES)
def test_units_and_norms_are_those_of_float64(images, width, views, dtype):
    embeddings = [random(images, width, seed=seed, dtype=dtype) for seed in range(views)]
    nonfinite = flags(views * images)
    units, inverse = unit_embeddings(embeddings, dtype, nonfinite)
    whole = torch.cat(embeddings)
    assert units.dtype == dtype and inverse.dtype == torch.float32
    assert error(units, unit(whole)) < min(GATES[dtype], 1.5 * error(unit(whole, dtype), unit(whole)) + 1e-7)
    torch.testing.assert_close(inverse.double() * whole.double().norm(dim=-1), torch.ones(len(whole)).double())
    assert not nonfinite.any()


def test_the_dtype_of_the_units_is_chosen_apart_from_that_of_the_embeddings():
    embedding = random(5, 40, dtype=torch.float16)
    assert error(unit_embeddings(embedding)[0], unit(embedding)) < 1e-6
    assert error(unit_embeddings(embedding.float(), torch.float16)[0], unit(embedding)) < 1e-3


LAYOUTS = {
    "columns of a wider tensor": lambda: random(6, 50, dtype=torch.float32)[:, 7:40],
    "every third row": lambda: random(18, 33, dtype=torch.float32)[::3],
    "transposed": lambda: random(33, 6, dtype=torch.float32).T,
    "every second column": lambda: random(6, 66, dtype=torch.float32)[:, ::2],
    "one row expanded": lambda: random(1, 33, dtype=torch.float32).expand(6, 33),
    "one column expanded": lambda: random(6, 1, dtype=torch.float32).expand(6, 33),
    "one number expanded": lambda: random(1, 1, dtype=torch.float32).expand(6, 33),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_stride_is_followed(layout):
    views = [random(6, 33, dtype=torch.float32), LAYOUTS[layout]()]
    units, inverse = unit_embeddings(views)
    expected, expected_inverse = unit_embeddings([view.contiguous() for view in views])
    assert torch.equal(units, expected) and torch.equal(inverse, expected_inverse)


def test_views_of_different_dtypes_are_each_read_in_their_own():
    views = [random(4, 24, seed=i, dtype=d) for i, d in enumerate((torch.float16, torch.float32, torch.bfloat16))]
    units, inverse = unit_embeddings(views)
    alone = [unit_embeddings(view) for view in views]
    assert units.dtype == torch.float32
    assert torch.equal(units, torch.cat([each for each, _ in alone]))
    assert torch.equal(inverse, torch.cat([each for _, each in alone]))


@pytest.mark.parametrize("size", [1e-38, 1e-30, 1e-13, 1e-12, 1e-3, 1e19, 1e30, 1e37])
def test_units_are_exact_at_any_scale(size):
    embedding = (random(3, 100) * size).float()
    nonfinite = flags(3)
    units, inverse = unit_embeddings(embedding, nonfinite=nonfinite)
    assert error(units, unit(embedding)) < 1e-6
    assert error(inverse, 1 / embedding.double().norm(dim=-1).clamp_min(1e-12)) < 1e-6
    assert not nonfinite.any()


@pytest.mark.parametrize("size", [3e4, 6e-8])
def test_squares_of_half_precision_neither_overflow_nor_vanish(size):
    embedding = torch.full((2, 100), size, dtype=torch.float16)
    assert error(unit_embeddings(embedding, torch.float16)[0], unit(embedding)) < 1e-3


def test_a_row_of_zeros_has_a_zero_unit_and_is_finite():
    embedding = random(3, 40, dtype=torch.float32)
    embedding[1] = 0
    nonfinite = flags(3)
    units, inverse = unit_embeddings(embedding, nonfinite=nonfinite)
    assert not units[1].any() and inverse[1] == 0 and not nonfinite.any()
    assert error(units, unit(embedding)) < 1e-6


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("column", [0, 17, 39])
def test_a_row_that_is_not_finite_is_flagged_and_zeroed_alone(value, column):
    views = [random(4, 40, dtype=torch.float32), random(4, 40, seed=1, dtype=torch.float16)]
    clean = unit_embeddings(views)
    views[1][2, column] = value
    nonfinite = flags(8)
    units, inverse = unit_embeddings(views, nonfinite=nonfinite)
    assert nonfinite.tolist() == [0, 0, 0, 0, 0, 0, 1, 0]
    assert not units[6].any() and inverse[6] == 0
    others = [0, 1, 2, 3, 4, 5, 7]
    assert torch.equal(units[others], clean[0][others]) and torch.equal(inverse[others], clean[1][others])


# Many images take the interpreter long; by default the twin in torch takes them, in tests/kernels/test_reference.py.
@pytest.mark.parametrize(
    ("images", "width", "dtype"),
    [
        pytest.param(*sizes, dtype, marks=[pytest.mark.slow] if sizes[0] > 100 else [])
        for sizes in SENT
        for dtype in GATES
    ],
)
def test_rows_are_sent_with_their_number_and_flags_in_a_tail_that_is_summed_and_cleared(images, width, dtype):
    check_sent_rows(images, width, dtype)


def test_embeddings_are_left_as_they_are():
    views = [random(4, 40, dtype=torch.float32), random(4, 40, seed=1, dtype=torch.float32)]
    before = [view.clone() for view in views]
    unit_embeddings(views)
    assert all(torch.equal(*pair) for pair in zip(views, before, strict=True))


def test_an_empty_batch_has_empty_units():
    units, inverse = unit_embeddings([torch.zeros(0, 5)] * 2)
    assert units.shape == (0, 5) and inverse.shape == (0,)


def test_more_channels_than_registers_are_refused_with_the_remedy():
    with pytest.raises(ValueError, match=f"width {MAX_WIDTH + 1} exceeds.*UNIGRAD_KERNELS=torch"):
        unit_embeddings(torch.zeros(1, MAX_WIDTH + 1))
