"""The momentum copy."""

import copy
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from trainer_state import batches, changed, make_trainer, small_config, state

from unigrad_fast.checkpoints.files import Reader
from unigrad_fast.training import branches, checkpoint
from unigrad_fast.training.target import embed, make_copies, make_target, refresh_, update_target_


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


def test_copies_are_what_autocast_makes_of_the_weights():
    torch.manual_seed(0)
    target = make_target(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(72, 4)))
    other = copy.deepcopy(target)
    target = target.to(memory_format=torch.channels_last)
    copies = make_copies(target, torch.bfloat16)
    assert list(copies) == ["0.weight", "0.bias", "3.weight", "3.bias"]
    assert copies["0.weight"].is_contiguous(memory_format=torch.channels_last)
    online = copy.deepcopy(other)
    with torch.no_grad():
        for parameter in online.parameters():
            parameter.add_(torch.randn_like(parameter))
    update_target_(target, online, 0.75, torch.tensor(0.0), copies)
    update_target_(other, online, 0.75, torch.tensor(0.0))
    views = torch.randn(2, 3, 5, 5).to(memory_format=torch.channels_last)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(embed(target, copies, views), other(views))
    assert all(p.dtype == torch.float32 for p in target.parameters())
    assert torch.equal(target[1].running_mean, other[1].running_mean) and target[1].running_mean.any()


def test_copies_follow_weights_that_others_wrote(online):
    target = make_target(online).float()
    copies = make_copies(target, torch.bfloat16)
    with torch.no_grad():
        target[0].weight.fill_(3.0)
    refresh_(copies, target)
    assert (copies["0.weight"] == 3).all() and copies["0.weight"].dtype == torch.bfloat16


def test_without_autocast_there_are_no_copies(online):
    assert make_copies(make_target(online), None) == {}


def run_in_bf16(images: str, folder: Path, with_copies: bool) -> dict[str, dict[str, Tensor]]:
    """State after a step, a checkpoint, and one more step of a trainer that begins from it."""
    config = small_config(images, engine__precision="bf16").model_copy(update={"output": folder})
    with nullcontext() if with_copies else mock.patch.object(branches, "make_copies", return_value={}):
        first, second = make_trainer(config), make_trainer(config)
    assert bool(second.target_copies) == with_copies
    first.step(0, batches(first))
    checkpoint.restore(second, Reader(checkpoint.save(first, {})))
    second.step(1, batches(second, 1))
    for name, low in second.target_copies.items():
        assert torch.equal(low, second.target.get_parameter(name).bfloat16())
    return state(second)


def test_a_run_with_copies_is_bitwise_the_one_that_casts_and_goes_on_from_its_checkpoints(images, workers, tmp_path):
    (ours,) = workers(1).run(run_in_bf16, str(images), tmp_path / "ours", True)
    (expected,) = workers(1).run(run_in_bf16, str(images), tmp_path / "cast", False)
    assert changed(expected, ours) == {}
