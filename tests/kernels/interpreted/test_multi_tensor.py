"""The passes over many tensors against float64, element by element; Triton runs in its interpreter."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from unigrad_fast.kernels import multi_tensor
from unigrad_fast.kernels.multi_tensor import BLOCK, CHUNK, lars_, lerp_, split
from unigrad_fast.training.optimizers import LARS
from unigrad_fast.training.target import make_copies, make_target, update_target_

SHAPES = [(5, 3), (1,), (BLOCK + 1,), (4,), (2, 3, 3, 3), (CHUNK + BLOCK + 7,), (CHUNK,), (2 * CHUNK + 3,)]
LR = torch.tensor(0.3, dtype=torch.float64)
SETTINGS = {"lr": LR, "momentum": 0.8, "weight_decay": 0.1, "trust_coefficient": 0.02}


def draw(seed: int, shapes: list[tuple[int, ...]] = SHAPES) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def share(of_the_online: float) -> Tensor:
    """The target's momentum."""
    return torch.tensor(1 - of_the_online, dtype=torch.float64)


def channels_last(tensors: list[Tensor]) -> list[Tensor]:
    return [t.to(memory_format=torch.channels_last) if t.ndim == 4 else t for t in tensors]


def copies(*lists: list[Tensor]) -> list[list[Tensor]]:
    return [[t.clone() for t in tensors] for tensors in lists]


def assert_close(ours: list[Tensor], expected: list[Tensor]) -> None:
    for mine, reference in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine.double(), reference, rtol=1e-6, atol=1e-6)


def assert_equal(ours: list[Tensor], expected: list[Tensor]) -> None:
    for mine, reference in zip(ours, expected, strict=True):
        assert torch.equal(mine.view(torch.int32), reference.view(torch.int32))


def lars_reference(weights, gradients, velocities, *, lr, momentum, weight_decay, trust_coefficient, adapt):
    """The formula in float64, one tensor at a time; new weights and velocities."""
    results = []
    for w, gradient, v in zip(weights, gradients, velocities, strict=True):
        update = gradient.double() + weight_decay * w.double()
        ratio = 1.0
        if adapt and w.any() and update.any():
            ratio = trust_coefficient * w.double().norm() / update.norm()
        v = momentum * v.double() + ratio * update
        results.append((w.double() - lr * v, v))
    return zip(*results, strict=True)


@pytest.mark.parametrize("weight", [0.0, 0.004, 0.7, 1.0])
def test_the_target_update_is_the_moving_average(weight):
    targets, onlines = draw(0), draw(1)
    expected = [t.double().lerp(o.double(), weight) for t, o in zip(targets, onlines, strict=True)]
    lerp_(targets, onlines, (), momentum=share(weight), skip=torch.tensor(0.0))
    assert_close(targets, expected)
    if weight == 1:
        assert_equal(targets, onlines)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
def test_a_dropped_step_leaves_the_target_bitwise_unchanged(dtype):
    targets, onlines = draw(0), [torch.full(shape, torch.nan) for shape in SHAPES]
    targets[0][0] = -0.0
    (before,) = copies(targets)
    lerp_(targets, onlines, (), momentum=share(0.5), skip=torch.ones((), dtype=dtype))
    assert_equal(targets, before)


def test_the_first_targets_are_written_in_low_precision_too():
    """fp16, as the interpreter does not round to bf16."""
    shapes = [*SHAPES, (6, 5, 3, 3)]
    targets, onlines = channels_last(draw(0, shapes)), channels_last(draw(1, shapes))
    low = [torch.full_like(t, 7.0, dtype=torch.float16) for t in targets]
    lerp_(targets, onlines, low[:-2], momentum=share(0.25), skip=torch.tensor(0.0))
    for target, written in zip(targets[:-2], low[:-2], strict=True):
        assert torch.equal(written, target.half())
    assert all((untouched == 7).all() for untouched in low[-2:])
    lerp_(targets, onlines, low, momentum=share(0.25), skip=torch.tensor(0.0))
    assert torch.equal(low[-1], targets[-1].half())
    (before,) = copies(low)
    lerp_(targets, onlines, low, momentum=share(0.25), skip=torch.tensor(1.0))  # dropped
    assert all(map(torch.equal, low, before))


def test_the_target_update_follows_memory_in_channels_last():
    shapes = [(6, 5, 3, 3), (4, 3, 1, 1), (7,)]
    targets, onlines = channels_last(draw(0, shapes)), channels_last(draw(1, shapes))
    targets[1] = targets[1].contiguous()  # of one pixel, and so in the same order
    pairs = list(zip(targets, onlines, strict=True))
    assert split(pairs) == (pairs, [])
    expected = [t.double().lerp(o.double(), 0.25) for t, o in pairs]
    lerp_(targets, onlines, (), momentum=share(0.25), skip=torch.tensor(0.0))
    assert_close(targets, expected)


def test_no_byte_outside_the_tensors_is_written():
    whole = torch.full((CHUNK + 64,), 5.0)
    inside = whole[16 : 16 + CHUNK + 9]  # ends between two boundaries of 16 bytes
    lerp_([inside], [torch.zeros_like(inside)], (), momentum=share(1.0), skip=torch.tensor(0.0))
    assert not inside.any()
    assert (whole[:16] == 5).all() and (whole[16 + CHUNK + 9 :] == 5).all()


@pytest.mark.parametrize("adapt", [True, False])
def test_three_steps_of_lars_are_those_of_the_formula(adapt):
    weights, velocities = draw(0), [torch.zeros(shape) for shape in SHAPES]
    expected_weights, expected_velocities = [w.double() for w in weights], [v.double() for v in velocities]
    for step in range(3):
        gradients = draw(10 + step)
        settings = {**SETTINGS, "lr": LR / (step + 1), "adapt": adapt}
        expected_weights, expected_velocities = lars_reference(
            expected_weights, gradients, expected_velocities, **settings
        )
        lars_(weights, gradients, velocities, **settings)
    assert_close(weights, expected_weights)
    assert_close(velocities, expected_velocities)


def test_the_ratio_is_one_where_weights_or_update_are_zero():
    weights, gradients = draw(0), draw(1)
    velocities = draw(2)
    weights[1].zero_()
    weights[5].zero_()
    gradients[0].zero_()
    gradients[5].zero_()
    gradients[7].zero_()
    for weight_decay in (0.0, 0.1):
        settings = {**SETTINGS, "weight_decay": weight_decay, "adapt": True}
        expected = lars_reference(weights, gradients, velocities, **settings)
        ours, momenta = copies(weights, velocities)
        lars_(ours, gradients, momenta, **settings)
        for tensors, references in zip((ours, momenta), expected, strict=True):
            assert_close(tensors, references)


@pytest.mark.parametrize("adapt", [True, False])
def test_gradients_are_scaled_before_weight_decay(adapt):
    weights, gradients, velocities = draw(0), draw(1), draw(2)
    settings = {**SETTINGS, "adapt": adapt}
    expected = lars_reference(weights, [g.double() / 4 for g in gradients], velocities, **settings)
    lars_(weights, gradients, velocities, **settings, skip=torch.tensor(0.0), scale=torch.tensor(0.25))
    for tensors, references in zip((weights, velocities), expected, strict=True):
        assert_close(tensors, references)


@pytest.mark.parametrize("adapt", [True, False])
def test_a_dropped_step_of_lars_changes_no_bit(adapt):
    weights, gradients, velocities = draw(0), [torch.full(shape, torch.nan) for shape in SHAPES], draw(2)
    velocities[0][0] = -0.0
    before = copies(weights, velocities)
    skip, scale = torch.tensor(1.0), torch.tensor(torch.nan)
    lars_(weights, gradients, velocities, **SETTINGS, adapt=adapt, skip=skip, scale=scale)
    assert_equal(weights, before[0])
    assert_equal(velocities, before[1])


def test_the_sums_of_one_tensor_go_over_all_of_its_chunks(monkeypatch):
    monkeypatch.setattr(multi_tensor, "CHUNK", 16)
    monkeypatch.setattr(multi_tensor, "MAX_CHUNKS", 8)
    multi_tensor._chunk_table.cache_clear()
    shapes = [(3,), (100,), (129,), (1000,), (16,)]
    weights, gradients, velocities = draw(0, shapes), draw(1, shapes), draw(2, shapes)
    table = multi_tensor.chunk_table(weights)
    assert torch.bincount(table[:, 0]).tolist() == [1, 7, 5, 8, 1]
    assert not table[:, 1].remainder(16).any()
    expected, _ = lars_reference(weights, gradients, velocities, **SETTINGS, adapt=True)
    lars_(weights, gradients, velocities, **SETTINGS, adapt=True)
    assert_close(weights, expected)
    multi_tensor._chunk_table.cache_clear()


def test_two_runs_are_bitwise_equal():
    weights, gradients, velocities = draw(0), draw(1), draw(2)
    first, second = copies(weights, velocities), copies(weights, velocities)
    for ours, momenta in (first, second):
        lars_(ours, gradients, momenta, **SETTINGS, adapt=True)
    for one, other in zip(first, second, strict=True):
        assert_equal(one, other)


def test_tensors_that_moved_are_found_where_they_are():
    weights, gradients, velocities = draw(0), draw(1), draw(2)
    for seed in (3, 4):
        lars_(weights, gradients, velocities, **SETTINGS, adapt=True)
        weights, velocities = copies(weights, velocities)
        gradients = draw(seed)
        expected, _ = lars_reference(weights, gradients, velocities, **SETTINGS, adapt=True)
    lars_(weights, gradients, velocities, **SETTINGS, adapt=True)
    assert_close(weights, expected)


def test_tables_of_a_captured_graph_are_written_once_it_is_captured():
    weights, gradients = draw(0), draw(1)
    expected = multi_tensor.address_table(weights, gradients)
    with multi_tensor.captured_tables() as tables:
        table = multi_tensor.address_table(weights, gradients)
        table.zero_()
        assert table is not multi_tensor.address_table(weights, gradients)
    assert not table.any()
    multi_tensor.fill(tables)
    assert torch.equal(table, expected)
    assert multi_tensor.address_table(weights, gradients) is expected


def test_autograd_is_told_of_the_change():
    targets, onlines, velocities = draw(0), draw(1), draw(2)
    lerp_(targets, onlines, (), momentum=share(0.5), skip=torch.tensor(0.0))
    assert all(t._version == 1 for t in targets)
    lars_(targets, onlines, velocities, **SETTINGS, adapt=True)
    assert all(t._version == 2 for t in targets) and all(v._version == 1 for v in velocities)


def test_what_the_kernels_cannot_walk_is_left_to_torch():
    flat, square = torch.zeros(64), torch.zeros(4, 4)
    image = torch.zeros(2, 3, 4, 5)
    left = [
        (flat.double(), flat.double()),
        (flat[1:9], torch.zeros(8)),  # not on a boundary of 16 bytes
        (flat[::2], flat[::2]),
        (square, square.T),
        (image, image.to(memory_format=torch.channels_last)),
        (torch.zeros(0), torch.zeros(0)),
        (torch.zeros(8), torch.zeros(2, 4)),
    ]
    taken = [(flat, flat), (flat[4:9], flat[8:13])]
    assert split([*taken, *left]) == (taken, left)


@pytest.mark.parametrize(("kernels", "calls"), [("triton", 2), ("torch", 0)])
def test_the_optimizer_calls_them_once_per_group_and_gives_the_rest_to_torch(kernels, calls, monkeypatch):
    monkeypatch.setenv("UNIGRAD_KERNELS", kernels)
    monkeypatch.setattr(multi_tensor, "lars_", Mock(wraps=lars_))
    weights = [*channels_last(draw(0)), torch.randn(9)[1:], torch.randn(7).double()]
    gradients = [torch.randn_like(w, memory_format=torch.contiguous_format) for w in weights]  # one in another order
    expected, _ = lars_reference(weights, gradients, [torch.zeros_like(w) for w in weights], **SETTINGS, adapt=True)
    parameters = [nn.Parameter(w) for w in weights]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    optimizer = LARS([{"params": parameters[:3]}, {"params": parameters[3:]}], **SETTINGS)
    optimizer.step()
    assert_close(parameters, expected)
    assert multi_tensor.lars_.call_count == calls


@pytest.mark.parametrize(("kernels", "calls"), [("triton", 1), ("torch", 0)])
def test_the_target_update_calls_them_once_and_gives_the_rest_to_torch(kernels, calls, monkeypatch):
    monkeypatch.setenv("UNIGRAD_KERNELS", kernels)
    monkeypatch.setattr(multi_tensor, "lerp_", Mock(wraps=lerp_))
    online = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Conv2d(5, 4, 1), nn.BatchNorm2d(4))
    target = make_target(online).to(memory_format=torch.channels_last)
    with torch.no_grad():
        for parameter in online.parameters():
            parameter.add_(torch.randn_like(parameter))
    pairs = list(zip(target.parameters(), online.parameters(), strict=True))
    low = make_copies(target, torch.float16)
    expected = [t.double().lerp(o.double(), 0.25) for t, o in pairs]
    update_target_(target, online, 0.75, skip=torch.tensor(0.0), copies=low)
    assert_close(target.parameters(), expected)
    assert multi_tensor.lerp_.call_count == calls
    update_target_(target, online, 0.0, skip=torch.tensor(1.0), copies=low)  # dropped
    assert_close(target.parameters(), expected)
    assert list(low) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert all(torch.equal(each, target.get_parameter(name).half()) for name, each in low.items())
