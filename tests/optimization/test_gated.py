"""Of every optimizer: a step that meets a non-finite value leaves no trace, and clipping is torch's."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from unigrad_fast.config import Optimizer
from unigrad_fast.training.optimizers import LARS, SGD, AdamW, build_optimizer

OPTIMIZERS = {
    "sgd": lambda weights, **more: SGD(weights, lr=0.1, weight_decay=0.1, **more),
    "lars": lambda weights, **more: LARS(weights, lr=0.1, weight_decay=0.1, **more),
    "adamw": lambda weights, **more: AdamW(weights, lr=0.1, weight_decay=0.1, **more),
}
every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


def weights(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator).to(dtype).requires_grad_() for size in ((4, 3), (5,), (2, 3, 3, 3))]


def give_gradients(parameters: list[Tensor], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


@every_optimizer
@pytest.mark.parametrize("clip_norm", [0.0, 1.0])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_dropped_step_is_as_if_it_had_not_been(name, clip_norm, value):
    ours, theirs = weights(), weights()
    optimizer, reference = (OPTIMIZERS[name](w, clip_norm=clip_norm) for w in (ours, theirs))
    for step in range(4):
        give_gradients(ours, seed=step)
        give_gradients(theirs, seed=step)
        if step == 2:
            ours[1].grad[3] = value
        else:
            reference.step()
        optimizer.step()  # which is not opened: a dropped step does not drop the next
        assert optimizer.nonfinite == (step == 2)
    assert all(map(torch.equal, ours, theirs))
    for ours, theirs in zip(optimizer.state.values(), reference.state.values(), strict=True):
        assert all(torch.equal(value, theirs[key]) for key, value in ours.items())


@every_optimizer
def test_a_flag_that_is_up_before_the_first_step_drops_it(name):
    ours = weights()
    optimizer = OPTIMIZERS[name](ours)
    give_gradients(ours, seed=0)
    optimizer.nonfinite.fill_(1)
    optimizer.step()
    assert all(map(torch.equal, ours, weights()))
    assert not any(value.any() for state in optimizer.state.values() for value in state.values())


@every_optimizer
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("norm", [0.5, 1e9])
def test_clipping_is_torchs_clipping(name, dtype, norm):
    ours, theirs = weights(dtype), weights(dtype)
    optimizer, reference = OPTIMIZERS[name](ours, clip_norm=norm), OPTIMIZERS[name](theirs)
    for step in range(3):
        give_gradients(ours, seed=step)
        give_gradients(theirs, seed=step)
        before = torch.nn.utils.clip_grad_norm_(theirs, norm)
        optimizer.step()
        reference.step()
        assert torch.allclose(optimizer.gradient_norm.double(), before.double())
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@every_optimizer
def test_a_copy_goes_on_like_the_original(name):
    ours = weights()
    optimizer = OPTIMIZERS[name](ours, clip_norm=1.0)
    give_gradients(ours, seed=0)
    optimizer.step()
    theirs, other = copy.deepcopy((ours, optimizer))
    for parameters, each in ((ours, optimizer), (theirs, other)):
        give_gradients(parameters, seed=1)
        each.step()
    assert all(map(torch.equal, ours, theirs))


def test_adamw_is_torchs():
    ours, theirs = weights(), weights()
    optimizer, reference = OPTIMIZERS["adamw"](ours), torch.optim.AdamW(theirs, lr=0.1, weight_decay=0.1)
    for step in range(5):
        give_gradients(ours, seed=step)
        give_gradients(theirs, seed=step)
        optimizer.step()
        reference.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def groups(**settings) -> list[tuple[int, float, float, bool | None]]:
    module = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Linear(4, 2))
    optimizer = build_optimizer(module, Optimizer(weight_decay=0.1, base_lr=0.3, **settings))
    return [(len(g["params"]), g["weight_decay"], g["lr_share"], g.get("adapt")) for g in optimizer.param_groups]


def test_biases_and_norms_have_the_rate_the_decay_and_the_adaptation_that_are_asked_for():
    excluded = {"exclude_bias_and_norm": True}
    assert groups(name="sgd") == [(6, 0.1, 1.0, None)]
    assert groups(name="lars") == [(6, 0.1, 1.0, True)]
    assert groups(name="sgd", **excluded) == [(2, 0.1, 1.0, None), (4, 0.0, 1.0, None)]
    assert groups(name="lars", **excluded) == [(2, 0.1, 1.0, True), (4, 0.0, 1.0, False)]
    assert groups(name="adamw", bias_base_lr=0.15) == [(2, 0.1, 1.0, None), (4, 0.1, 0.5, None)]
    assert groups(name="lars", bias_base_lr=0.15, **excluded) == [(2, 0.1, 1.0, True), (4, 0.0, 0.5, False)]
