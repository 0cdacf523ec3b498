"""Norms that add and rectify by the kernels, in Triton's interpreter, against torch's modules in float64."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torchvision.models.resnet import BasicBlock

from unigrad_fast.config import Projector
from unigrad_fast.kernels import batch_norm
from unigrad_fast.networks.batch_norm import GroupedBatchNorm, convert
from unigrad_fast.networks.encoder import build_projector
from unigrad_fast.networks.residual import fuse

GROUPS, IMAGES, CHANNELS = 2, 3, 40


class Block(nn.Module):
    """Two norms with a ReLU, the second with a shortcut."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(CHANNELS, CHANNELS, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(CHANNELS)
        self.conv2 = nn.Conv2d(CHANNELS, CHANNELS, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(CHANNELS)

    def forward(self, x):
        if isinstance(self.bn1, GroupedBatchNorm):
            return self.bn2(self.conv2(self.bn1(self.conv1(x), relu=True)), residual=x, relu=True)
        y = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(y)) + x)


@pytest.fixture
def block():
    torch.manual_seed(0)
    block = Block()
    for norm in (block.bn1, block.bn2):
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    return block


def chain() -> nn.Sequential:
    """Two residual blocks; the first one's result goes to both branches of the second."""
    torch.manual_seed(0)
    chain = nn.Sequential(*(BasicBlock(CHANNELS, CHANNELS) for _ in range(2)))
    for norm in (part for part in chain.modules() if isinstance(part, nn.BatchNorm2d)):
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    return chain


def state_after(block: nn.Module, x: torch.Tensor, dy: torch.Tensor, groups: int) -> dict[str, torch.Tensor]:
    x = x.clone().requires_grad_()
    y = torch.cat([block(part) for part in x.chunk(groups)])
    y.backward(dy)
    gradients = {f"d{name}": p.grad for name, p in block.named_parameters()}
    return {"y": y.detach(), "dx": x.grad, **gradients, **dict(block.named_buffers())}


def test_training_is_torchs_with_separate_groups(block):
    x, dy = (torch.randn(GROUPS * IMAGES, CHANNELS, 3, 5).contiguous(memory_format=torch.channels_last) for _ in "xy")
    expected = state_after(copy.deepcopy(block).double(), x.double(), dy.double(), GROUPS)
    convert(block).count = GROUPS
    found = state_after(block, x, dy, 1)
    for name, value in expected.items():
        torch.testing.assert_close(found[name].double(), value.double(), rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_gradients_from_both_branches_of_the_next_block_are_added_in_the_norm(compiled, monkeypatch):
    x, dy = (torch.randn(GROUPS * IMAGES, CHANNELS, 3, 5).contiguous(memory_format=torch.channels_last) for _ in "xy")
    blocks = chain()
    expected = state_after(copy.deepcopy(blocks).double(), x.double(), dy.double(), GROUPS)
    convert(blocks).count = GROUPS
    fuse(blocks, nn.Sequential())
    once, seconds, sums = copy.deepcopy(blocks), [], batch_norm.sums

    def spy(*arguments):
        seconds.append(arguments[9] is not None)
        return sums(*arguments)

    if compiled:
        torch.compiler.reset()
        blocks.compile(fullgraph=True, backend="aot_eager")
    else:
        monkeypatch.setattr(batch_norm, "sums", spy)
    found = state_after(blocks, x, dy, 1)
    assert compiled or seconds == [False, False, True, False]
    for name, value in expected.items():
        torch.testing.assert_close(found[name].double(), value.double(), rtol=1e-4, atol=1e-4, msg=name)
    once[0].twice = False
    for name, value in state_after(once, x, dy, 1).items():
        assert torch.equal(found[name], value), name


class Stem(nn.Module):
    """The first layers of a ResNet."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(CHANNELS, CHANNELS, 1, bias=False), nn.BatchNorm2d(CHANNELS)
        self.maxpool = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        nn.init.normal_(self.bn1.weight)

    def forward(self, x):
        if isinstance(self.bn1, GroupedBatchNorm):
            return self.bn1(self.conv1(x), relu=True, pool=self.maxpool)
        return self.maxpool(torch.relu(self.bn1(self.conv1(x))))


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_norm_that_rectifies_and_pools_is_torchs_with_separate_groups(compiled, monkeypatch):
    torch.manual_seed(0)
    stem = Stem()
    x = torch.randn(GROUPS * IMAGES, CHANNELS, 6, 7).contiguous(memory_format=torch.channels_last)
    dy = torch.randn(GROUPS * IMAGES, CHANNELS, 3, 4).contiguous(memory_format=torch.channels_last)
    expected = state_after(copy.deepcopy(stem).double(), x.double(), dy.double(), GROUPS)
    convert(stem).count = GROUPS
    other = copy.deepcopy(stem)
    monkeypatch.setattr(stem.maxpool, "forward", None)  # not called
    if compiled:
        torch.compiler.reset()
        stem.compile(fullgraph=True, backend="aot_eager")
    found = state_after(stem, x, dy, 1)
    for name, value in expected.items():
        torch.testing.assert_close(found[name].double(), value.double(), rtol=1e-4, atol=1e-4, msg=name)
    with torch.no_grad():
        assert torch.equal(other(x), found["y"])
    assert all(map(torch.equal, other.buffers(), stem.buffers()))
    other.eval()(x)  # by torch's max-pool


def test_either_of_two_results_may_be_used_alone(block):
    x, dy = (torch.randn(GROUPS * IMAGES, CHANNELS, 3, 5).contiguous(memory_format=torch.channels_last) for _ in "xy")
    convert(block).count = GROUPS
    gradients = []
    for used in (None, 0, 1):
        ours = x.clone().requires_grad_()
        y = block.bn1(ours, residual=x, relu=True, twice=used is not None)
        (y if used is None else y[used]).backward(dy)
        gradients.append(ours.grad)
    assert torch.equal(gradients[0], gradients[1]) and torch.equal(gradients[0], gradients[2])


def test_without_gradient_numbers_and_buffers_are_the_same_and_the_input_stays(block):
    x = torch.randn(GROUPS * IMAGES, CHANNELS, 3, 5).contiguous(memory_format=torch.channels_last)
    convert(block).count = GROUPS
    other, before = copy.deepcopy(block), x.clone()
    expected = other(x.clone().requires_grad_()).detach()
    with torch.no_grad():
        found = block(x)
    assert torch.equal(x, before)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    for ours, theirs in zip(block.buffers(), other.buffers(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.slow  # tests/kernels/test_batch_norm_compiled.py compiles the kernels
def test_a_compiled_block_is_one_graph_with_the_same_numbers(block):
    """Forward and backward, and without gradient."""
    x, dy = (torch.randn(GROUPS * IMAGES, CHANNELS, 3, 5).contiguous(memory_format=torch.channels_last) for _ in "xy")
    convert(block).count = GROUPS
    other = copy.deepcopy(block)
    expected = state_after(copy.deepcopy(block), x, dy, 1)
    torch.compiler.reset()
    other.compile(fullgraph=True, backend="aot_eager")
    found = state_after(other, x, dy, 1)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    block(x)
    with torch.no_grad():
        assert torch.equal(other(x), block(x))
    assert all(torch.equal(*pair) for pair in zip(other.buffers(), block.buffers(), strict=True))


def test_evaluation_uses_the_running_buffers(block):
    x = torch.randn(4, CHANNELS, 3, 5).contiguous(memory_format=torch.channels_last)
    block(torch.randn(6, CHANNELS, 3, 5))
    block.eval()
    expected = copy.deepcopy(block).double()(x.double())
    convert(block).count = 2
    with torch.no_grad():
        torch.testing.assert_close(block(x).double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(block(x).double(), expected, rtol=1e-5, atol=1e-5)


def test_hooks_of_the_norms_fire(block):
    convert(block)
    seen = []
    block.bn1.register_forward_hook(lambda module, arguments, output: seen.append(output.min().item()))
    block(torch.randn(4, CHANNELS, 3, 5))
    assert seen == [0.0]


def test_the_operators_are_what_torch_expects():
    x = torch.randn(4, 40, 3, 5).contiguous(memory_format=torch.channels_last)
    ops = torch.ops.unigrad_fast
    mean, variance, weight, bias = torch.zeros(2, 40), torch.ones(2, 40), torch.ones(40), torch.zeros(40)
    count, sums = torch.full((2,), 30.0, dtype=torch.float64), torch.zeros(2, 2, 40, dtype=torch.float64)
    affine = (mean, variance, weight, bias)
    running = (torch.zeros(40), torch.ones(40), torch.tensor(0))
    parts = ops.batch_norm_statistics(x, 2).unsqueeze(0)
    _, mask = ops.batch_norm_normalise(x, *affine, x, 1e-5, True, True)
    for operator, arguments in [
        (ops.batch_norm_statistics, (x, 2)),
        (ops.batch_norm_settle, (parts, *running, 0.1, torch.float32)),
        (ops.batch_norm_normalise, (x, *affine, x, 1e-5, True, True)),
        (ops.batch_norm_normalise, (x, *affine, None, 1e-5, True, False)),
        (ops.batch_norm_normalise_, (x.clone(), *affine, x, 1e-5, True)),
        (ops.batch_norm_sums, (x, x, *affine, None, 1e-5, False)),
        (ops.batch_norm_sums, (x, x, *affine, mask, 1e-5, True, x.clone(), True)),
        (ops.batch_norm_gradient, (x, x, *affine, sums, count, 1e-5, True)),
        (ops.batch_norm_pool, (x, *affine, 1e-5, True)),
        (ops.batch_norm_pool, (x, *affine, 1e-5, False)),
    ]:
        torch.library.opcheck(operator.default, arguments, test_utils=("test_schema", "test_faketensor"))


def test_a_projector_that_is_computed_again_takes_the_statistics_of_the_pass():
    x, dy = torch.randn(GROUPS * IMAGES, 24), torch.randn(GROUPS * IMAGES, CHANNELS)
    results = []
    for again in (False, True):
        torch.manual_seed(0)
        projector = build_projector(24, Projector(width=CHANNELS))
        groups = convert(projector)
        fuse(nn.Identity(), projector)
        projector.contexts = groups.repeatable if again else None
        groups.count = GROUPS
        y = projector(x)
        groups.count = 1  # of a later pass
        y.backward(dy)
        results.append([p.grad for p in projector.parameters()] + list(projector.buffers()))
    assert all(map(torch.equal, *results))
