"""Encoder: layout as in the paper, torchvision's keys, batch statistics by group of views."""

import pytest
import torch
import torchvision
from thin import thin
from torch import nn

from unigrad_fast.config import Model, Projector
from unigrad_fast.networks.backbones import BUILDERS, build_backbone
from unigrad_fast.networks.encoder import build_encoder, build_projector, joined
from unigrad_fast.recipes.backbones import BACKBONES

CPU = torch.device("cpu")


def settings(**changes) -> Model:
    return Model(**{"backbone": "resnet18", "projector": Projector(width=16), **changes})


@pytest.mark.long
@pytest.mark.parametrize("name", ["resnet18", "resnet50", "wide_resnet50_2"])
def test_the_backbone_loads_strictly_into_torchvisions_model(name):
    backbone = build_backbone(name)
    reference = getattr(torchvision.models, name)()
    assert backbone.feature_dim == reference.fc.in_features
    reference.fc = nn.Identity()
    reference.load_state_dict(backbone.state_dict(), strict=True)


def test_residual_branches_start_at_zero():
    backbone = build_backbone("resnet18")
    assert not backbone.layer1[0].bn2.weight.any() and not backbone.layer4[1].bn2.weight.any()


def test_the_small_stem_keeps_the_resolution():
    images = torch.randn(2, 3, 32, 32)
    small, usual = build_backbone("resnet18", "small"), build_backbone("resnet18")
    assert small.maxpool(small.conv1(images)).shape == (2, 64, 32, 32)
    assert usual.maxpool(usual.conv1(images)).shape == (2, 64, 8, 8)
    assert small(images).shape == usual(images).shape == (2, 512)


@pytest.mark.parametrize("depth", [1, 2, 3, 5])
def test_the_projector_has_the_papers_layout(depth):
    layers = list(build_projector(512, Projector(depth=depth, width=24)))
    assert [type(layer) for layer in layers] == [nn.Linear, nn.BatchNorm1d, nn.ReLU] * (depth - 1) + [nn.Linear]
    linears = [layer for layer in layers if isinstance(layer, nn.Linear)]
    assert [layer.bias is not None for layer in linears] == [False] * (depth - 1) + [True]
    assert [layer.out_features for layer in linears] == [24] * depth


def test_the_encoder_is_a_function_of_the_seed_alone():
    first, again, other = (build_encoder(settings(), seed, CPU) for seed in (1, 1, 2))
    state = torch.random.get_rng_state()
    build_encoder(settings(), 3, CPU)
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first.backbone.conv1.weight, other.backbone.conv1.weight)


def in_one_forward(encoder, views):
    """What one forward over all of these views together gives."""
    return encoder.projector(encoder.backbone(torch.cat(views))).chunk(len(views))


@pytest.mark.parametrize(
    ("statistics", "groups"),
    [
        ("auto", [[0], [1], [2, 4], [3]]),
        ("per_view", [[0], [1], [2], [3], [4]]),
        ("per_size", [[0, 1], [2, 4], [3]]),
    ],
)
def test_views_share_batch_statistics_by_group(statistics, groups):
    views = [torch.randn(6, 3, size, size) for size in (64, 64, 32, 48, 32)]
    # Two encoders with equal weights: forward passes in training mode move the running buffers.
    encoder, reference = (build_encoder(settings(batch_statistics=statistics), 0, CPU) for _ in range(2))
    embeddings = encoder(views)
    for group in groups:
        for number, expected in zip(group, in_one_forward(reference, [views[i] for i in group]), strict=True):
            torch.testing.assert_close(embeddings[number], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("statistics", ["auto", "per_view", "per_size"])
def test_groups_of_one_size_may_pass_together(statistics):
    """In float64, so that only the order of sums differs."""
    views = [torch.randn(4, 3, size, size, dtype=torch.float64) for size in (32, 32, 16, 16, 16)]
    found = []
    for one_pass in (False, True):
        with thin():
            encoder = build_encoder(settings(batch_statistics=statistics, stem="small"), 0, CPU).double()
        encoder.one_pass = one_pass
        embeddings = encoder(views)
        sum((e * (i + e.roll(1, 1))).sum() for i, e in enumerate(embeddings)).backward()
        state = {**encoder.state_dict(), **{name: p.grad for name, p in encoder.named_parameters()}}
        found.append({**state, "embeddings": torch.stack(embeddings)})
    assert len(encoder._passes(views)) == 2
    for name, expected in found[0].items():
        torch.testing.assert_close(found[1][name], expected, rtol=1e-9, atol=1e-9, msg=name)


def test_every_backbone_of_the_configuration_has_a_builder():
    assert tuple(BUILDERS) == BACKBONES


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_views_are_joined_once_and_cast_on_the_way(dtype, layout):
    views = [torch.randn(2, 3, 4, 4).contiguous(memory_format=layout) for _ in range(3)]
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        whole = joined(views)
        assert torch.equal(whole, torch.cat(views).to(dtype or torch.float32))
        assert whole.is_contiguous(memory_format=layout)
        chunks = whole.chunk(3)
        assert joined(chunks) is whole and joined(views[:1]) is views[0]
        for others in (chunks[::-1], chunks[:2], chunks[1:2], whole.chunk(2)[:1] * 2):
            assert torch.equal(joined(others), torch.cat(list(others))) and joined(others) is not whole
