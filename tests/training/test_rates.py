"""Rates on the device are the numbers that were sent, and optimizers move as with numbers of Python's."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from unigrad_fast.optimization.gated import Gated
from unigrad_fast.training.optimizers import LARS, SGD, AdamW
from unigrad_fast.training.rates import Rates

RATES = (0.1 / 3, 0.7 / 9, 1e-4 / 7)  # none is one of fp32
OPTIMIZERS = {
    "sgd": lambda groups: SGD(groups, lr=1.0, weight_decay=0.1),
    "lars": lambda groups: LARS(groups, lr=1.0, weight_decay=0.1, clip_norm=1.0),
    "adamw": lambda groups: AdamW(groups, lr=1.0),
}


def built(name: str, dtype: torch.dtype) -> tuple[Gated, list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((3, 4), (5,))
    parameters = [nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for shape in shapes]
    shares = (1.0, 0.3)
    groups = [{"params": [p], "lr_share": share} for p, share in zip(parameters, shares, strict=True)]
    return OPTIMIZERS[name](groups), parameters


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_optimizer_moves_as_with_numbers_of_pythons(name, dtype):
    (ours, weights), (theirs, expected) = built(name, dtype), built(name, dtype)
    rates = Rates(ours, torch.device("cpu"))
    for step, rate in enumerate(RATES):
        rates.send(rate, 1.0, 0.996, epoch=0.0)
        for group in theirs.param_groups:
            group["lr"] = rate * group["lr_share"]
        for optimizer, parameters in ((ours, weights), (theirs, expected)):
            for number, parameter in enumerate(parameters):
                generator = torch.Generator().manual_seed(10 * step + number)
                parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=dtype)
            optimizer.step()
        assert all(map(torch.equal, weights, expected))


@pytest.mark.parametrize("is_constant", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_rate_is_there_to_the_last_bit_and_stays_where_it_is(dtype, is_constant):
    with mock.patch.object(SGD, "rate_dtype", dtype):
        optimizer, _ = built("sgd", torch.float32)
        optimizer.param_groups[1]["constant"] = is_constant
        rates = Rates(optimizer, torch.device("cpu"))
    first = [group["lr"] for group in optimizer.param_groups]
    for rate in RATES:
        rates.send(rate, 1.0, 1 - rate, 3 * rate)
        found = [group["lr"] for group in optimizer.param_groups]
        assert all(a is b for a, b in zip(first, found, strict=True))
        expected = [rate, 0.3 * (1.0 if is_constant else rate)]
        assert [each.item() for each in found] == torch.tensor(expected, dtype=dtype).tolist()
        assert (rates.target_momentum.item(), rates.epoch.item()) == (1 - rate, 3 * rate)
