"""An encoder's pass without gradient with products between its norms, in Triton's interpreter."""

from __future__ import annotations

import copy
from collections import Counter
from functools import partial
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torchvision.models.resnet import Bottleneck, ResNet

from unigrad_fast.config import Projector
from unigrad_fast.kernels import batch_norm, batch_norm_ops
from unigrad_fast.networks import batch_norm as grouped
from unigrad_fast.networks.encoder import build_projector
from unigrad_fast.networks.lockstep import together
from unigrad_fast.networks.norm_convolution import NormConv2d, use_norm_convolutions
from unigrad_fast.networks.residual import fuse
from unigrad_fast.training.target import embed, make_copies, make_target

SHARE, GROUPS, IMAGES, SIDE = 8, 2, 3, 20
KERNELS = ("statistics", "normalise", "normalise_")


class Network(nn.Module):
    """A ResNet of bottlenecks with an eighth of the channels of ResNet-50's first two stages, and a projector."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        with mock.patch.object(ResNet, "_make_layer", thin(ResNet._make_layer)):
            self.backbone = ResNet(Bottleneck, [2, 1, 0, 0])
        self.backbone.fc = nn.Identity()
        self.projector = build_projector(512 // SHARE, Projector(depth=2, width=8))
        for norm in (part for part in self.modules() if isinstance(part, nn.BatchNorm2d)):
            nn.init.normal_(norm.weight)
            nn.init.normal_(norm.bias)
        self.groups = grouped.convert(self)
        self.groups.count = GROUPS
        fuse(self.backbone, self.projector)

    def forward(self, x: Tensor, run=None) -> Tensor:
        steps = self.steps(x)
        return run(steps) if run else self.projector(self.backbone(x))

    def steps(self, x: Tensor):
        x = yield from self.backbone.steps(x)
        return (yield from self.projector.steps(x))


def thin(make):
    def make_thin(self, block, planes, blocks, *arguments, **settings):
        return make(self, block, planes // SHARE, blocks, *arguments, **settings) if blocks else nn.Sequential()

    return make_thin


def networks() -> tuple[nn.Module, nn.Module]:
    """Targets with convolutions alone, and with products."""
    target = make_target(Network()).to(memory_format=torch.channels_last)
    other = copy.deepcopy(target)
    use_norm_convolutions(other)
    return target, other


def images() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(GROUPS * IMAGES, 3, SIDE, SIDE, generator=generator)
    return x.contiguous(memory_format=torch.channels_last)


def passed(target: nn.Module, x: Tensor, *run) -> Tensor:
    """The embeddings in fp16, with copies of the weights."""
    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        return embed(target, make_copies(target, torch.float16), x, *run)


@pytest.fixture
def calls(monkeypatch) -> Counter[str]:
    """How often each kernel of batch norm runs, and the product."""
    counts: Counter[str] = Counter()

    def counted(name: str, function, *arguments, **keywords):
        counts[name] += 1
        return function(*arguments, **keywords)

    for name in KERNELS:
        monkeypatch.setattr(batch_norm, name, partial(counted, name, getattr(batch_norm, name)))
    product = batch_norm_ops.norm_product
    monkeypatch.setattr(batch_norm_ops, "norm_product", partial(counted, "norm_product", product))
    return counts


def test_a_target_with_products_is_as_exact_and_reads_less(calls):
    plain, products = networks()
    exact = copy.deepcopy(plain).double()
    with torch.no_grad():
        expected = exact(images().double())
    ours = passed(products, images())
    # 3 blocks: conv1 and conv3 of each and the first's downsample; strided are the stem, 3 conv2 and a downsample.
    assert calls == {"norm_product": 7, "statistics": 1 + 3 + 1 + 1, "normalise_": 3 + 3 + 1, "normalise": 2}
    theirs = passed(plain, images())
    assert not products.groups.own and ours.dtype == theirs.dtype == torch.float16
    errors = [float((each.double() - expected).norm() / expected.norm()) for each in (ours, theirs)]
    assert errors[0] <= 1.5 * errors[1] + 2**-11
    for name, buffer in exact.named_buffers():
        found, before = (float((each.get_buffer(name) - buffer).double().norm()) for each in (products, plain))
        assert found <= 1.5 * before + 2**-11 * float(buffer.double().norm()), name


def test_in_lockstep_and_in_turn_results_are_bitwise_equal(monkeypatch):
    """With the statistics of all ranks, which here are those of one."""
    monkeypatch.setattr(grouped, "gathered", lambda own_GS: own_GS[None].clone())
    online = Network().to(memory_format=torch.channels_last)
    _, target = networks()
    other = copy.deepcopy(target)
    expected = passed(target, images())
    found, _ = passed(other, images(), partial(together, online=online.steps(images())))
    assert torch.equal(found, expected) and all(map(torch.equal, other.buffers(), target.buffers()))
    assert not other.groups.own and not other.groups.gathered


@pytest.mark.parametrize("case", ["gradient", "fp32", "evaluation", "not channels-last"])
def test_elsewhere_the_convolution_is_torchs(case, calls):
    plain, products = networks()
    x = images()
    if case == "evaluation":
        plain.eval(), products.eval()
    if case == "not channels-last":
        x = x.contiguous()
        plain, products = (each.to(memory_format=torch.contiguous_format) for each in (plain, products))
        plain, products = plain.backbone.layer1[0].conv1, products.backbone.layer1[0].conv1
        x = torch.randn(2, plain.in_channels, 3, 5)
    with torch.set_grad_enabled(case == "gradient"), torch.autocast("cpu", torch.float16, enabled=case != "fp32"):
        assert torch.equal(plain(x), products(x))
    assert not calls["norm_product"]


def test_hooks_of_the_convolutions_run(calls):
    _, products = networks()
    seen = []
    for part in products.modules():
        if isinstance(part, NormConv2d):
            part.register_forward_hook(lambda module, arguments, output: seen.append(output.dtype))
    passed(products, images())
    assert seen == [torch.float16] * 7 == [torch.float16] * calls["norm_product"]


@pytest.mark.slow
def test_a_compiled_block_is_one_graph_with_the_same_numbers():
    _, products = networks()
    block = products.backbone.layer1[0]
    for part in block.modules():
        if isinstance(part, nn.Conv2d):
            part.half()
    other = copy.deepcopy(block)
    x = torch.randn(GROUPS * IMAGES, 8, 3, 5).half().contiguous(memory_format=torch.channels_last)
    torch.compiler.reset()
    other.compile(fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(other(x), block(x))
    assert all(map(torch.equal, other.buffers(), block.buffers()))
