"""The gated SGD against torch's, and what it does with clipping and non-finite gradients."""

import pytest
import torch
from torch import nn

from unigrad_fast.config import Optimizer
from unigrad_fast.training.optimizers import SGD, build_optimizer


def network(dtype=torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 2)).to(dtype)


def descend(optimizer, module: nn.Module, steps: int, spoil: int | None = None) -> None:
    dtype = next(module.parameters()).dtype
    for step in range(steps):
        inputs = torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(step)).to(dtype)
        optimizer.zero_grad()
        module(inputs).square().sum().backward()
        if step == spoil:
            module[3].weight.grad[0, 0] = torch.nan
        if isinstance(optimizer, SGD):
            optimizer.open()
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_it_is_torchs_sgd(dtype, memory_format):
    ours, theirs = (network(dtype).to(memory_format=memory_format) for _ in range(2))
    descend(SGD(ours.parameters(), lr=0.01, momentum=0.9, weight_decay=0.1), ours, 5)
    descend(torch.optim.SGD(theirs.parameters(), lr=0.01, momentum=0.9, weight_decay=0.1), theirs, 5)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("clip_norm", [0.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_default_dtype_is_not_asked_for(dtype, clip_norm):
    ours, theirs = network(dtype), network(dtype)
    descend(SGD(theirs.parameters(), lr=0.01, clip_norm=clip_norm), theirs, 3)
    torch.set_default_dtype(torch.float64)
    try:
        optimizer = SGD(ours.parameters(), lr=0.01, clip_norm=clip_norm)
        for step in range(3):  # as `descend`, whose images would be others
            torch.set_default_dtype(torch.float32)
            inputs = torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(step)).to(dtype)
            torch.set_default_dtype(torch.float64)
            optimizer.zero_grad()
            ours(inputs).square().sum().backward()
            optimizer.open()
            optimizer.step()
    finally:
        torch.set_default_dtype(torch.float32)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)
    assert optimizer.nonfinite.dtype == torch.float32


@pytest.mark.parametrize("norm", [0.5, 1e9])
def test_clipping_is_torchs_clipping(norm):
    ours, theirs = network(), network()
    optimizer = SGD(ours.parameters(), lr=0.01, clip_norm=norm)
    reference = torch.optim.SGD(theirs.parameters(), lr=0.01, momentum=0.9)
    reference.register_step_pre_hook(lambda *_: torch.nn.utils.clip_grad_norm_(theirs.parameters(), norm) and None)
    descend(optimizer, ours, 4)
    descend(reference, theirs, 4)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_the_norm_is_the_one_before_clipping():
    module = network()
    optimizer = SGD(module.parameters(), lr=0.0, clip_norm=1e-3)
    descend(optimizer, module, 1)
    assert optimizer.gradient_norm > 1


@pytest.mark.parametrize("clip_norm", [0.0, 1.0])
@pytest.mark.parametrize("spoiled", [0, 2])
def test_a_step_with_a_nan_gradient_is_as_if_it_had_not_been(spoiled, clip_norm):
    module, other = network(), network()
    optimizer = SGD(module.parameters(), lr=0.01, weight_decay=0.1, clip_norm=clip_norm)
    reference = SGD(other.parameters(), lr=0.01, weight_decay=0.1, clip_norm=clip_norm)
    descend(optimizer, module, spoiled)
    descend(reference, other, spoiled)
    before = [p.clone() for p in module.parameters()]
    inputs = torch.randn(5, 3, 8, 8)
    optimizer.zero_grad()
    module(inputs).sum().backward()
    module[3].weight.grad[0, 0] = torch.nan
    optimizer.step()
    assert optimizer.nonfinite == 1
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
    module[1].load_state_dict(other[1].state_dict())  # the forward pass moved the running buffers
    descend(optimizer, module, 3)
    descend(reference, other, 3)
    for a, b in zip(module.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_flag_raised_before_the_step_drops_it():
    module = network()
    optimizer = SGD(module.parameters(), lr=0.01)
    module(torch.randn(5, 3, 8, 8)).sum().backward()
    before = [p.clone() for p in module.parameters()]
    optimizer.nonfinite.fill_(1)
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))


def test_biases_and_norms_can_be_left_out_of_weight_decay():
    module = network()
    groups = build_optimizer(module, Optimizer(weight_decay=0.1, exclude_bias_and_norm=True)).param_groups
    assert [(len(g["params"]), g["weight_decay"]) for g in groups] == [(2, 0.1), (4, 0.0)]
    assert all(p.ndim == 1 for p in groups[1]["params"])
    (group,) = build_optimizer(module, Optimizer(weight_decay=0.1)).param_groups
    assert len(group["params"]) == 6 and group["weight_decay"] == 0.1
