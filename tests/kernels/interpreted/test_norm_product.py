"""Products between two norms: the kernel, in Triton's interpreter, against the plain-torch twin in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from unigrad_fast.kernels import batch_norm_ops, norm_product
from unigrad_fast.kernels import batch_norm_reference as reference

pytestmark = pytest.mark.usefixtures("poisoned")
EPS = 1e-5
ROUNDOFF = {torch.float32: 2.0**-24, torch.float16: 2.0**-11}
CASES = [  # groups, shape of a group's input, channels of the result
    (2, (1, 3, 1, 5), 3),  # smaller than a tile
    (1, (2, 16, 4, 4), 32),  # whole tiles
    (2, (3, 40, 5, 7), 70),  # 105 rows: 7 tiles of 16 rows, merged 4 at a time
    (1, (5, 70, 11, 11), 33),  # 605 rows: 38 tiles in 5 bunches
]


def inputs(groups: int, shape: tuple[int, ...], channels: int, dtype: torch.dtype, normalises: bool, mean=0.0):
    """x, the matrix and what normalises x."""
    generator = torch.Generator().manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    depth = shape[1]
    x = (normal(groups * shape[0], *shape[1:]) + mean).to(dtype).contiguous(memory_format=torch.channels_last)
    matrix = (normal(channels, depth) / depth**0.5).to(dtype)
    before = (normal(groups, depth), normal(groups, depth).square() + 0.5, normal(depth), normal(depth))
    return x, matrix, before if normalises else (None,) * 4


def bound(x: Tensor, matrix: Tensor, before: tuple, groups: int, eps: float) -> tuple[Tensor, Tensor]:
    """y in float64, and how far rounding may move each of its elements: |x'|, summed with |W|, times the roundings."""
    dtype = x.dtype
    wide = [None if each is None else each.double() for each in before]
    normalised = x.double()
    slack = torch.zeros_like(normalised)
    if wide[0] is not None:
        normalised, _ = reference.normalise(normalised, *wide, None, eps, relu=True, keep_mask=False)
        size = (x.double().abs() + 4) * 4 * (wide[2].abs().max() + wide[3].abs().max())  # before terms cancel
        slack = 8 * ROUNDOFF[torch.float32] * size + ROUNDOFF[dtype] * normalised
    y, _ = reference.norm_product(normalised, matrix.double(), groups, None, None, None, None, eps)
    sums = (matrix.shape[1] + 1) * ROUNDOFF[torch.float32] * normalised.abs() + slack
    moved, _ = reference.norm_product(sums, matrix.double().abs(), groups, None, None, None, None, eps)
    return y, moved + ROUNDOFF[dtype] * y.abs() + 2.0**-24


@pytest.mark.parametrize("dtype", ROUNDOFF)
@pytest.mark.parametrize("normalises", [False, True])
@pytest.mark.parametrize(("groups", "shape", "channels"), CASES)
def test_the_product_is_that_of_float64_and_the_statistics_are_those_of_the_result(
    groups, shape, channels, normalises, dtype
):
    x, matrix, before = inputs(groups, shape, channels, dtype, normalises)
    y, found = norm_product.norm_product(x, matrix, groups, *before, EPS)
    expected, most = bound(x, matrix, before, groups, EPS)
    assert y.dtype == dtype and y.is_contiguous(memory_format=torch.channels_last)
    assert ((y.double() - expected).abs() <= most).all()
    compare(found, y, groups)


def compare(found: Tensor, y: Tensor, groups: int) -> None:
    """The statistics of y as it was rounded; in a tile of 16 rows fp32 sums of differences from the first row."""
    channels = y.shape[1]
    expected = reference.statistics(y.double(), groups)
    assert torch.equal(found[:, -1], expected[:, -1])
    parts = y.double().movedim(1, -1).reshape(groups, -1, channels)
    spread = (parts.amax(1) - parts.amin(1)).clamp_min(2.0**-24)
    roundoff = 20 * 2.0**-24  # 16 additions, a difference, a square
    assert ((found[:, :channels] - expected[:, :channels]).abs() <= roundoff * spread).all()
    squares = (found[:, channels:-1] - expected[:, channels:-1]).abs()
    assert (squares <= 4 * roundoff * spread.square() * parts.shape[1]).all()


def test_statistics_far_from_zero_are_as_exact():
    x, matrix, before = inputs(2, (3, 40, 5, 7), 70, torch.float32, False, mean=1e4)
    y, found = norm_product.norm_product(x, matrix, 2, *before, EPS)
    compare(found, y, 2)


def test_without_weight_and_bias_the_norm_only_normalises():
    x, matrix, (mean, variance, *_) = inputs(2, (3, 40, 5, 7), 70, torch.float32, True)
    ones, zeros = torch.ones(40), torch.zeros(40)
    expected, _ = norm_product.norm_product(x, matrix, 2, mean, variance, ones, zeros, EPS)
    assert torch.equal(norm_product.norm_product(x, matrix, 2, mean, variance, None, None, EPS)[0], expected)


@pytest.mark.parametrize("normalises", [False, True])
def test_nan_stays_in_its_row_and_its_group(normalises):
    x, matrix, before = inputs(2, (3, 40, 5, 7), 70, torch.float32, normalises)
    x[4, 7, 2, 2] = float("nan")
    y, found = norm_product.norm_product(x, matrix, 2, *before, EPS)
    rows = y.movedim(1, -1).isnan()
    assert rows[4, 2, 2].all() and rows.sum() == 70
    assert found[0].isfinite().all() and found[1, :-1].isnan().all()


def test_no_rows_have_no_statistics():
    x, matrix, before = inputs(2, (1, 40, 5, 7), 70, torch.float32, True)
    y, found = norm_product.norm_product(x[:0], matrix, 2, *before, EPS)
    assert y.shape == (0, 70, 5, 7) and torch.equal(found, torch.zeros(2, 141, dtype=torch.float64))


@pytest.mark.parametrize("normalises", [False, True])
def test_the_operator_is_what_torch_expects(normalises):
    x, matrix, before = inputs(2, (3, 40, 5, 7), 70, torch.float32, normalises)
    arguments = (x, matrix, 2, *before, EPS)
    torch.library.opcheck(
        batch_norm_ops.norm_product.registered.default, arguments, test_utils=("test_schema", "test_faketensor")
    )
    for ours, theirs in zip(batch_norm_ops.norm_product(*arguments), reference.norm_product(*arguments), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
