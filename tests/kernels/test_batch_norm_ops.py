"""Batch norm's operators as torch sees them, in plain torch: schemas, shapes, and compilation without a gap."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from unigrad_fast.kernels import batch_norm_ops  # noqa: F401  registers the operators

OPERATORS = torch.ops.unigrad_fast
GROUPS, CHANNELS, EPS = 2, 40, 1e-5


@pytest.fixture(autouse=True)
def _default_path(monkeypatch):
    monkeypatch.delenv("UNIGRAD_KERNELS", raising=False)


def images() -> Tensor:
    return torch.randn(4, CHANNELS, 3, 5).contiguous(memory_format=torch.channels_last)


def running() -> list[Tensor]:
    return [torch.zeros(CHANNELS), torch.ones(CHANNELS), torch.tensor(0)]


def forward_and_backward(x, dy, residual, weight, bias, running_mean, running_var, tracked) -> list[Tensor]:
    """A norm with addition and ReLU, then one in place without; backward through the first."""
    parts = OPERATORS.batch_norm_statistics(x, GROUPS).unsqueeze(0)
    mean, variance, count = OPERATORS.batch_norm_settle(parts, running_mean, running_var, tracked, 0.1, torch.float32)
    affine = (mean, variance, weight, bias)
    y, mask = OPERATORS.batch_norm_normalise(x, *affine, residual, EPS, True, True)
    sums, dparameters, kept = OPERATORS.batch_norm_sums(dy, x, *affine, mask, EPS, True, dy, True)
    dx = OPERATORS.batch_norm_gradient(kept, x, *affine, sums, count, EPS, False)
    again = y + 1
    OPERATORS.batch_norm_normalise_(again, *affine, None, EPS, True)
    return [y, mask, dparameters, dx, kept, again]


def test_operators_compile_in_one_graph_with_the_same_numbers():
    inputs = [images(), images(), images(), torch.randn(CHANNELS), torch.randn(CHANNELS)]
    buffers, compiled_buffers = running(), running()
    expected = forward_and_backward(*inputs, *buffers)
    torch.compiler.reset()
    compiled = torch.compile(forward_and_backward, fullgraph=True, backend="aot_eager")
    found = compiled(*inputs, *compiled_buffers)
    for ours, theirs in zip([*found, *compiled_buffers], [*expected, *buffers], strict=True):
        assert torch.equal(ours, theirs) and ours.stride() == theirs.stride()
    assert compiled_buffers[2] == GROUPS


def test_operators_are_what_torch_expects():
    x, weight, bias = images(), torch.randn(CHANNELS), torch.randn(CHANNELS)
    affine = (torch.zeros(GROUPS, CHANNELS), torch.ones(GROUPS, CHANNELS), weight, bias)
    count, sums = torch.full((GROUPS,), 30.0).double(), torch.zeros(GROUPS, 2, CHANNELS).double()
    parts = OPERATORS.batch_norm_statistics(x, GROUPS).unsqueeze(0)
    _, mask = OPERATORS.batch_norm_normalise(x, *affine, x, EPS, True, True)
    for operator, arguments in [
        (OPERATORS.batch_norm_statistics, (x, GROUPS)),
        (OPERATORS.batch_norm_settle, (parts, *running(), 0.1, torch.float32)),
        (OPERATORS.batch_norm_normalise, (x, *affine, x, EPS, True, True)),
        (OPERATORS.batch_norm_normalise, (x, *affine, None, EPS, False, False)),
        (OPERATORS.batch_norm_normalise_, (x.clone(), *affine, x.clone(), EPS, True)),
        (OPERATORS.batch_norm_sums, (x, x, *affine, None, EPS, False)),
        (OPERATORS.batch_norm_sums, (x, x, *affine, None, EPS, False, None, True)),
        (OPERATORS.batch_norm_sums, (x, x, *affine, mask, EPS, True, x.clone(), True)),
        (OPERATORS.batch_norm_gradient, (x, x, *affine, sums, count, EPS, True)),
        (OPERATORS.norm_product, (x, torch.randn(7, CHANNELS), GROUPS, *affine, EPS)),
        (OPERATORS.norm_product, (x, torch.randn(7, CHANNELS), GROUPS, None, None, None, None, EPS)),
    ]:
        torch.library.opcheck(operator.default, arguments)


def test_a_product_between_norms_is_the_norm_the_convolution_and_the_statistics():
    x, matrix = images(), torch.randn(7, CHANNELS)
    affine = (torch.randn(GROUPS, CHANNELS), torch.rand(GROUPS, CHANNELS), torch.randn(CHANNELS), torch.randn(CHANNELS))
    y, found = OPERATORS.norm_product(x, matrix, GROUPS, *affine, EPS)
    normalised, _ = OPERATORS.batch_norm_normalise(x, *affine, None, EPS, True, False)
    assert torch.equal(y, torch.nn.functional.conv2d(normalised, matrix[..., None, None]))
    assert torch.equal(found, OPERATORS.batch_norm_statistics(y, GROUPS))


def refusing(batch_norm, *arguments, eps: float = 1e-5, **keywords) -> Tensor:
    """F.batch_norm of torch 2.11, which takes no eps of 0."""
    if eps <= 0.0:
        raise ValueError(f"batch_norm eps must be positive, but got {eps}")
    return batch_norm(*arguments, eps=eps, **keywords)


def test_nothing_needs_a_torch_that_takes_an_eps_of_0(monkeypatch):
    inputs = [images(), images(), images(), torch.randn(CHANNELS), torch.randn(CHANNELS)]
    expected = forward_and_backward(*inputs, *running())
    functional = torch.nn.functional
    monkeypatch.setattr(functional, "batch_norm", partial(refusing, functional.batch_norm))
    assert all(map(torch.equal, forward_and_backward(*inputs, *running()), expected))
