"""Batch norm by groups: the kernels, in Triton's interpreter, against the plain-torch twins in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from unigrad_fast.kernels import batch_norm as kernel
from unigrad_fast.kernels import batch_norm_reference as reference
from unigrad_fast.kernels.heuristics import NORM_KERNELS

pytestmark = pytest.mark.usefixtures("poisoned")
EPS = 1e-5


@pytest.fixture(params=[(1 << 20, 4), (1 << 20, 32), (1, 32)], ids=["bunches", "one_bunch", "one_chunk"])
def programs(request, monkeypatch):
    """Rows in as many chunks as there may be, merged in several bunches or in one, and in a single chunk."""
    programs, parts = request.param
    changed = {
        name: replace(each, programs=programs, parts=each.parts and parts) for name, each in NORM_KERNELS.items()
    }
    monkeypatch.setattr(kernel, "NORM_KERNELS", changed)


def random(*shape, dtype=torch.float32, mean=0.0):
    generator = torch.Generator().manual_seed(sum(shape))
    x = (torch.randn(*shape, generator=generator, dtype=torch.float64) + mean).to(dtype)
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x


def error(found, expected) -> float:
    return float((found.double() - expected.double()).abs().max())


def batch(groups: int, shape: tuple[int, ...], dtype: torch.dtype, affine: bool = True):
    """x, its statistics in float64 and fp32, weight and bias."""
    x = random(groups * shape[0], *shape[1:], dtype=dtype)
    x64 = x.double()
    mean, variance, count = reference.settle(
        reference.statistics(x64, groups).unsqueeze(0), None, None, None, momentum=0.1, dtype=torch.float64
    )
    channels = shape[1]
    weight, bias = (random(channels + 1)[1:] + 1, random(channels + 2)[2:]) if affine else (None, None)
    return x, x64, mean, variance, count, weight, bias


SHAPES = [(5, 3), (4, 40, 3, 5), (3, 130, 2, 1), (9, 64, 7, 7)]


@pytest.mark.parametrize(("shape", "groups"), [(SHAPES[0], 3), (SHAPES[1], 2), (SHAPES[2], 1), (SHAPES[3], 2)])
def test_statistics_are_exact(shape, groups, programs):
    x = random(groups * shape[0], *shape[1:], mean=1e4)
    found = kernel.statistics(x, groups)
    expected = reference.statistics(x.double(), groups)
    channels = shape[1]
    assert found.shape == expected.shape and torch.equal(found[:, -1], expected[:, -1])
    torch.testing.assert_close(found[:, :channels], expected[:, :channels], rtol=1e-9, atol=0)
    torch.testing.assert_close(found[:, channels:-1], expected[:, channels:-1], rtol=1e-5, atol=1e-6)


def test_statistics_of_a_constant_channel_have_no_deviation_and_nan_stays_in_its_channel(programs):
    x = random(8, 40, 3, 3)
    x[:, 1] = 1234.567
    x[3, 2, 1, 1] = float("nan")
    mean, squares, _count = kernel.statistics(x, 2).split([40, 40, 1], dim=1)
    assert torch.equal(squares[:, 1], torch.zeros(2, dtype=torch.float64))
    assert mean[0, 2].isnan() and squares[0, 2].isnan() and mean[1].isfinite().all()
    assert mean[0, 3:].isfinite().all() and squares[0, 3:].isfinite().all()


def test_no_rows_have_no_statistics_and_the_sums_are_zero():
    x = torch.empty(0, 40, 3, 3)
    assert torch.equal(kernel.statistics(x, 2), torch.zeros(2, 2 * 40 + 1, dtype=torch.float64))
    mean, variance = torch.zeros(2, 40), torch.ones(2, 40)
    y, _ = kernel.normalise(x, mean, variance, None, None, None, eps=EPS, relu=True, keep_mask=False)
    assert y.shape == x.shape
    sums, dparameters, _ = kernel.sums(x, x, mean, variance, None, None, None, eps=EPS, relu=False)
    assert not sums.any() and not dparameters.any()


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("ranks", [1, 3])
def test_ranks_settle_as_float64_does(ranks, momentum):
    parts = torch.stack(
        [reference.statistics(random(4 * (rank + 1), 70, dtype=torch.float64), 2) for rank in range(ranks)]
    )
    if ranks == 3:
        parts[1] = 0  # a rank without rows
    parts = torch.cat([torch.full((ranks, 5), torch.nan), parts.flatten(1)], dim=1)[:, 5:].unflatten(1, (2, -1))
    state = [random(70), random(71)[1:].abs(), torch.tensor(4)]
    wide = [state[0].double(), state[1].double(), state[2].clone()]
    expected = reference.settle(parts, *wide, momentum=momentum, dtype=torch.float64)
    found = kernel.settle(parts, *state, momentum=momentum)
    for a, b in zip((*found, *state), (*expected, *wide), strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "groups", "relu", "add", "affine"),
    [
        ((5, 3), 2, False, False, True),
        ((5, 3), 1, True, False, False),
        ((4, 40, 3, 5), 3, True, True, True),
        ((4, 40, 3, 5), 2, True, False, True),
        ((4, 40, 3, 5), 1, False, True, False),
        ((3, 130, 2, 1), 2, True, True, False),
        ((9, 64, 7, 7), 2, True, True, True),
        ((9, 64, 7, 7), 1, True, False, True),
    ],
)
def test_forward_and_backward_agree_with_float64(shape, groups, relu, add, affine, programs):
    x, x64, mean, variance, count, weight, bias = batch(groups, shape, torch.float32, affine)
    residual = random(*x.shape, dtype=torch.float32) * 0.5 if add else None
    dy = random(*x.shape) * 0.1 + 0.3
    settings = {"eps": EPS, "relu": relu}
    narrow = (mean.float(), variance.float(), weight, bias)
    wide = (mean, variance, *(None if p is None else p.double() for p in (weight, bias)))

    y, mask = kernel.normalise(x, *narrow, residual, **settings, keep_mask=relu and add)
    y64, mask64 = reference.normalise(
        x64, *wide, None if residual is None else residual.double(), **settings, keep_mask=relu and add
    )
    assert error(y, y64) < 1e-5
    if relu and add:
        assert torch.equal(mask, mask64)
    mask, mask64 = (mask, mask64) if relu and add else (None, None)
    dy64, arguments, arguments64 = dy.double(), (dy, x, *narrow, mask), (x64, *wide, mask64)
    use = {**settings, "second": random(*x.shape, dtype=torch.float32).flip(0) if add else None, "keep": add}
    sums, dparameters, kept = kernel.sums(*arguments, **use)
    if add:
        dy64, use["second"] = dy64 + use["second"].double(), None
    sums64, dparameters64, kept64 = reference.sums(dy64, *arguments64, **use)
    size = float(dy64.abs().sum()) / x.shape[1]
    assert error(sums, sums64) < 1e-6 * size * 10 and error(dparameters, dparameters64) < 1e-5 * size
    if add:
        assert error(kept, kept64) < 1e-6
        dy, dy64, settings["relu"] = kept, kept64, False
    dx = kernel.gradient(dy, x, *narrow, sums, count, **settings)
    assert error(dx, reference.gradient(dy64, x64, *wide, sums64, count, **settings)) < 1e-4


@pytest.mark.parametrize("size", [(6, 8), (7, 5), (1, 2)])
@pytest.mark.parametrize("groups", [1, 2])
def test_pooling_and_its_gradient_are_those_of_torch(size, groups, programs):
    """Exact against autograd through max-pool and ReLU in float64; windows without a number above zero among them."""
    x, x64, mean, variance, count, weight, bias = batch(groups, (3, 40, *size), torch.float32)
    bias = bias - 1
    narrow, wide = (mean.float(), variance.float(), weight, bias), (mean, variance, weight.double(), bias.double())
    normalised, _ = reference.normalise(x64, *wide, None, EPS, relu=False, keep_mask=False)
    normalised.requires_grad_()
    y64 = torch.nn.functional.max_pool2d(torch.relu(normalised), 3, stride=2, padding=1)
    y, choice = kernel.pool(x, *narrow, EPS, keep_choice=True)
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert error(y, y64.detach()) < 1e-5 and (y == 0).any() and (y > 0).any()
    assert torch.equal(choice, reference.pool(x64, *wide, EPS, keep_choice=True)[1])
    assert torch.equal(kernel.pool(x, *narrow, EPS, keep_choice=False)[0], y)

    dy = random(*y.shape) * 0.1 + 0.3
    dy64 = torch.autograd.grad(y64, normalised, dy.double())[0]
    sums, dparameters, kept = kernel.sums(dy, x, *narrow, None, EPS, False, keep=True, choice=choice)
    sums64, dparameters64, _ = reference.sums(dy64, x64, *wide, None, EPS, False)
    assert error(kept, dy64) < 1e-6
    assert error(sums, sums64) < 1e-4 and error(dparameters, dparameters64) < 1e-4
    for found in (sums64, dparameters64), (sums, dparameters):
        assert found[0].any() and found[1].any()
    dx = kernel.gradient(dy, x, *narrow, sums, count, EPS, False, choice)
    assert error(dx, reference.gradient(dy64, x64, *wide, sums64, count, EPS, False)) < 1e-4
    twin = reference.sums(dy.double(), x64, *wide, None, EPS, False, None, True, choice)
    assert error(twin[2], dy64) < 1e-12 and error(twin[0], sums64) < 1e-10
    assert error(reference.gradient(dy.double(), x64, *wide, sums64, count, EPS, False, choice), dx.double()) < 1e-4


def test_of_equal_numbers_the_first_is_chosen_and_nan_stays():
    x = torch.ones(1, 32, 4, 4).contiguous(memory_format=torch.channels_last)
    x[0, 1] = -1
    x[0, 2, 2, 3] = float("nan")
    mean, variance = torch.zeros(1, 32), torch.ones(1, 32) - EPS
    y, choice = kernel.pool(x, mean, variance, None, None, EPS, keep_choice=True)
    assert choice[0, 0].tolist() == [[4, 3], [1, 0]]
    assert not y[0, 1].any() and (choice[0, 1] == reference.NOWHERE).all()
    assert y[0, 2].isnan().tolist() == [[False, False], [False, True]]


def test_in_place_writes_the_same_over_its_input():
    x, _, mean, variance, _, weight, bias = batch(2, (4, 40, 3, 5), torch.float16)
    arguments = (mean.float(), variance.float(), weight, bias, random(*x.shape, dtype=torch.float16))
    y, _ = kernel.normalise(x, *arguments, eps=EPS, relu=True, keep_mask=False)
    x = x.contiguous(memory_format=torch.channels_last)
    kernel.normalise_(x, *arguments, eps=EPS, relu=True)
    assert torch.equal(x, y) and y.dtype == torch.float16


def test_the_mask_of_twin_and_kernel_says_what_is_above_zero():
    x = random(6, 70, 2, 2)
    mean, variance = torch.zeros(2, 70), torch.ones(2, 70) - EPS
    for function in (kernel.normalise, reference.normalise):
        _, mask = function(x, mean, variance, None, None, None, eps=EPS, relu=True, keep_mask=True)
        assert torch.equal(reference._unpacked(mask, x), x > 0)
