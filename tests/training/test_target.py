"""The momentum copy."""

import pytest
import torch
from torch import nn

from unigrad_fast.training.target import make_target, update_target_


@pytest.fixture
def online() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double().eval()


def test_the_target_is_an_equal_copy_that_receives_no_gradient(online):
    target = make_target(online)
    assert target.training
    for mine, theirs in zip(target.parameters(), online.parameters(), strict=True):
        assert torch.equal(mine, theirs) and mine is not theirs and not mine.requires_grad
    online.train()(torch.randn(5, 3).double())
    assert not torch.equal(target[1].running_mean, online[1].running_mean)


def test_the_update_is_the_moving_average_and_leaves_buffers_alone(online):
    target = make_target(online)
    with torch.no_grad():
        for parameter in online.parameters():
            parameter.add_(1.0)
        online[1].running_mean.fill_(7.0)
    before = [p.clone() for p in target.parameters()]
    update_target_(target, online, 0.996, skip=torch.tensor(0.0))
    for old, mine, theirs in zip(before, target.parameters(), online.parameters(), strict=True):
        torch.testing.assert_close(mine, 0.996 * old + 0.004 * theirs, rtol=1e-12, atol=1e-12)
    assert not target[1].running_mean.any()


def test_a_dropped_step_leaves_the_target_bitwise_unchanged(online):
    target = make_target(online)
    before = [p.clone() for p in target.parameters()]
    with torch.no_grad():
        for parameter in online.parameters():
            parameter.add_(1.0)
    update_target_(target, online, 0.9, skip=torch.tensor(1.0))
    assert all(torch.equal(a, b) for a, b in zip(before, target.parameters(), strict=True))


def test_the_update_pairs_elements_by_place_and_not_by_memory():
    online = nn.Conv2d(3, 4, 3)
    target = make_target(online).to(memory_format=torch.channels_last)
    with torch.no_grad():
        online.weight.copy_(torch.randn_like(online.weight))
    update_target_(target, online, 0.0, skip=torch.tensor(0.0))
    assert torch.equal(target.weight, online.weight)
