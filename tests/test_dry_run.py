"""The walk through a step without a card: nothing waits, and what is counted is what closed forms say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache, partial
from importlib import resources
from itertools import accumulate
from typing import get_args
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torchvision
from thin import thin
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

from unigrad_fast.config import Config, resolve
from unigrad_fast.doctor.choices import WITHOUT_TRITON
from unigrad_fast.dry_run.cards import Card, CardName, Host
from unigrad_fast.dry_run.walked import Walk, Work
from unigrad_fast.dry_run.walking import prepared, walk
from unigrad_fast.networks import norm_convolution
from unigrad_fast.networks.batch_norm import GroupedBatchNorm
from unigrad_fast.objectives import UniGrad
from unigrad_fast.runtime import precision
from unigrad_fast.runtime.errors import UserError
from unigrad_fast.training import branches
from unigrad_fast.training import trainer as training
from unigrad_fast.training.reduction import BucketedReduction

CARD, HOST = Card.of("h100"), Host.expected()
NORMS = 6  # of the thin network, two of them in the projector


def configured(ranks: int, images: int = 4, **changes) -> Config:
    tree = {
        "output": "/nowhere",
        "data": {"train": "/nowhere", "batch_size": ranks * images, "image_size": 32, **changes.pop("data", {})},
        "model": {"backbone": "resnet18", "projector": {"width": 64}},
        **changes,
    }
    return resolve("imagenet_100ep", tree)


@cache
def walked(config: Config, ranks: int) -> Walk:
    """Of a thin network; what several tests look at is walked once."""
    with thin(stages=1):
        return walk(config, ranks, CARD)


CASES = {
    "two views": {},
    "multi-crop": {"data": {"preset": "multicrop", "local_views": {"size": 16}}},
    "CutMix": {"data": {"cutmix": {"probability": 1.0, "group": 2}}},
    "accumulation": {"engine": {"accumulation_steps": 2}},
    "LARS": {"optimizer": {"name": "lars", "clip_norm": 1.0, "exclude_bias_and_norm": True, "bias_base_lr": 0.01}},
    "AdamW": {"optimizer": {"name": "adamw", "clip_norm": 1.0}},
    "MoCo": {"objective": {"method": "moco", "bank_size": 32}},
    "SimSiam": {"objective": {"method": "simsiam"}},
    "fp16": {"engine": {"precision": "fp16", "accumulation_steps": 2}, "optimizer": {"clip_norm": 1.0}},
}


@pytest.mark.parametrize(
    ("case", "ranks"), [*((case, 8) for case in CASES), *((case, 1) for case in ("two views", "multi-crop", "MoCo"))]
)
def test_the_host_never_waits_inside_a_step(case, ranks):
    found = walked(configured(ranks, **CASES[case]), ranks)
    assert found.waits == []
    assert found.parts["convolution"].flops > 0 and found.parts["normalisation"].launches > 0
    if ranks == 1:
        assert not [kind for kind, each in found.collectives.items() if kind == "gather"]


@pytest.mark.parametrize(("case", "passes"), [("two views", 1), ("multi-crop", 2)])
def test_a_norm_gathers_once_for_all_groups_of_a_pass_and_for_both_branches(case, passes):
    """Besides, F's rows are gathered, with their flags; gradients are reduced."""
    found = walked(configured(8, **CASES[case]), 8)
    assert found.collectives["gather"].count == NORMS * passes + 1
    assert found.collectives["reduce"].count == NORMS * passes + 1


def test_a_sharded_correlation_takes_two_gathers_and_an_exchange_and_its_share_of_the_memory():
    whole, shard = (walked(configured(8, objective={"placement": each}), 8) for each in ("replicated", "sharded"))
    assert shard.waits == [] and whole.collectives["gather"].count + 1 == shard.collectives["gather"].count
    assert shard.collectives["exchange"].count == 1 and "exchange" not in whole.collectives
    assert shard.peak["correlation"] < whole.peak["correlation"] / 4
    rows, width = 8, 64  # of a rank, and a row more for a tail
    assert shard.parts["objective"].flops == 2 * 2 * 8 * (rows + 1) * width * (width // 8)


@pytest.mark.long
def test_a_step_of_resnet50_on_8_cards_has_at_most_120_collectives_and_78_ms_by_count():
    """The host has 4 ms of the loader's besides its launches, which take half of the card's time at most."""
    config = resolve("imagenet_100ep", {"output": "/nowhere", "data": {"train": "/nowhere", "batch_size": 1024}})
    found = walk(config, 8, CARD)
    assert found.collective_count <= 120
    assert found.of_card <= 0.078 and found.of_host(HOST) - found.host_by_phase(HOST)["data"] <= 0.039
    assert found.waits == []


def test_products_between_norms_save_what_their_norms_read_and_wrote():
    """A block in each stage of ResNet-50, on a feature map of 8 x 8."""
    config = configured(1, images=4, model={"backbone": "resnet50", "projector": {"width": 64}})
    totals, flops, launches = [], [], []
    for tried in (False, True):
        with (
            mock.patch.object(norm_convolution, "TRIED", tried),
            mock.patch.object(torchvision.models, "resnet50", partial(ResNet, Bottleneck, [1] * 4)),
        ):
            found = walk(config, 1, CARD)
        assert found.waits == []
        totals.append(sum(part.read + part.written for part in found.parts.values()))
        flops.append(found.parts["convolution"].flops)
        launches.append(found.launches)
    # Positions and channels of what products compute: first layers, the first block's downsample, last layers.
    outputs = [(64, 64), (64, 128), (16, 256), (4, 512), (64, 256), (64, 256), (16, 512), (4, 1024), (1, 2048)]
    normalised = sum(positions * channels // 4 for positions, channels in outputs[-4:])
    images, number, groups = 8, 2, 2  # in bf16
    tiles = groups * sum(-(-4 * positions // 128) * channels for positions, channels in outputs)
    saved = images * number * (sum(positions * channels for positions, channels in outputs) + 2 * normalised)
    assert totals[0] - totals[1] == saved - 2 * tiles * 2 * 8  # two numbers of float64 per tile and channel
    assert flops[0] == flops[1] and launches[0] - launches[1] == 9 + 4


@pytest.mark.slow
def test_a_step_with_multi_crop_has_at_most_290_collectives_with_those_of_its_gradients():
    tree = {"output": "/nowhere", "data": {"train": "/nowhere", "batch_size": 1024}}
    found = walk(resolve("imagenet_100ep_multicrop", tree), 8, CARD)
    encoder = training.build_encoder(resolve("imagenet_100ep_multicrop", tree).model, 0, torch.device("meta"))
    norms = sum(isinstance(module, GroupedBatchNorm) for module in encoder.modules())
    buckets = len(BucketedReduction(encoder.parameters()).buckets)
    assert buckets > 1 and found.collectives["reduce"].count == 2 * norms + buckets
    assert found.collective_count <= 290 and found.waits == []


def reading(self, online, target, mix=None):
    online[0].sum().item()


def waiting(self, online, target, mix=None):
    torch.cuda.synchronize()
    return _forward(self, online, target, mix)


_forward = UniGrad.forward


def test_a_value_that_is_read_ends_the_walk_and_a_wait_is_found():
    with (
        thin(stages=1),
        mock.patch.object(UniGrad, "forward", reading),
        pytest.raises(RuntimeError, match="reads a value"),
    ):
        walk(configured(1), 1, CARD)
    with thin(stages=1), mock.patch.object(UniGrad, "forward", waiting):
        assert walk(configured(1), 1, CARD).waits == ["torch.cuda.synchronize"]


def grouped_resnet18(**settings) -> nn.Module:
    """A thin network whose second convolution of each block has groups."""
    with thin(stages=1):
        network = torchvision.models.resnet18(**settings)
    for module in network.modules():
        if isinstance(module, BasicBlock):
            width = module.conv2.out_channels
            module.conv2 = nn.Conv2d(width, width, 3, padding=1, groups=4, bias=False)
    return network


def test_flops_are_those_of_closed_forms():
    """Of a convolution 2·N·H·W·C·D·k² forward, twice that backward but for the first, which gives no input gradient.

    In G groups it has C/G input channels.
    """
    config, sums = configured(1, images=4), [0, 0]

    def count(module: nn.Conv2d, arguments, output) -> None:
        flops = 2 * output.numel() * module.in_channels // module.groups * module.kernel_size[0] ** 2
        sums[0] += flops
        sums[1] += flops * (1 if module.in_channels == 3 else 2)

    with mock.patch.object(torchvision.models, "resnet18", grouped_resnet18):
        encoder = training.build_encoder(config.model, 0, torch.device("cpu"))
        for module in encoder.modules():
            if isinstance(module, nn.Conv2d):
                module.register_forward_hook(count)
        encoder([torch.randn(4, 3, 32, 32) for _ in range(2)])
        found = walk(config, 1, CARD)
    assert found.parts["convolution"].flops == 2 * sums[0] + sums[1]
    rows, width = 8, 64
    product, update = 2 * rows * width**2, rows * width * (width + 128)
    assert found.parts["objective"].flops == product + update


def test_memory_is_what_the_tensors_take():
    config = configured(1)
    with thin(stages=1):
        encoder = training.build_encoder(config.model, 0, torch.device("cpu"))
    found = walked(config, 1)
    weights = 4 * sum(p.numel() for p in encoder.parameters())
    assert found.peak["weights"] == found.peak["momentum"] == found.peak["target"] == weights
    assert found.peak["correlation"] >= 4 * 64 * 64 + 8


def test_lars_takes_two_launches_and_one_more_for_biases_and_norms_by_themselves():
    alike, apart = (
        walked(configured(1, optimizer={"name": "lars", "exclude_bias_and_norm": excluded}), 1)
        for excluded in (False, True)
    )
    assert apart.parts["optimizer"].launches == alike.parts["optimizer"].launches + 1
    assert apart.peak["momentum"] == apart.peak["weights"]


def test_the_target_branch_casts_no_weights_as_its_update_has_written_them():
    config = configured(1, engine={"precision": "bf16"})
    with thin(stages=1):
        encoder = training.build_encoder(config.model, 0, torch.device("cpu"))
        found = walk(config, 1, CARD)
        with mock.patch.object(branches, "make_copies", return_value={}):
            casting = walk(config, 1, CARD)
    layers = [module for module in encoder.modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    weights = [parameter for layer in layers for parameter in layer.parameters()]
    assert casting.parts["casts"].launches - found.parts["casts"].launches == len(weights)
    low = 2 * sum(parameter.numel() for parameter in weights)
    assert found.peak["the target's weights in half precision"] == low
    assert found.parts["target"].launches == casting.parts["target"].launches
    assert found.parts["target"].written - casting.parts["target"].written == low
    assert found.parts["target"].read == casting.parts["target"].read


def test_at_stage_2_a_rank_moves_its_part_and_gathers_the_rest():
    ranks, changes = 4, CASES["LARS"]
    with thin(stages=1):
        encoder = training.build_encoder(configured(ranks).model, 0, torch.device("cpu"))
        whole, parted = (walk(configured(ranks, **changes, engine={"zero_stage": s}), ranks, CARD) for s in (0, 2))
    numels = [p.numel() for p in encoder.parameters()]
    groups = [sum(p.numel() for p in encoder.parameters() if (p.ndim > 1) == many) for many in (True, False)]
    flat = 4 * sum(-(-numel // (2 * ranks)) * 2 * ranks for numel in groups)  # DeepSpeed's alignment
    assert parted.waits == []
    assert whole.peak["weights"] == whole.peak["momentum"] == 4 * sum(numels)
    assert parted.peak["weights"] == flat
    assert parted.peak["master weights"] == parted.peak["momentum"] == flat // ranks
    assert parted.collectives["gather"].count == whole.collectives["gather"].count + 2
    assert parted.collectives["gather"].bytes == whole.collectives["gather"].bytes + flat


def test_what_the_projector_computes_again_it_does_not_keep():
    """Neither products nor collectives come twice."""

    def counted(on: bool) -> Walk:
        network = {"backbone": "resnet18", "projector": {"width": 1024}}
        engine = {"precision": "bf16", "zero_stage": 2, "recompute_projector": on}
        with thin(stages=1):
            return walk(configured(2, **CASES["multi-crop"], model=network, engine=engine), 2, CARD)

    kept, again = counted(False), counted(True)
    most = "activations, gradients and what passes"
    assert again.peak.pop(most) < kept.peak.pop(most)
    assert again.peak == kept.peak and again.collectives == kept.collectives
    assert again.parts["linear"] == kept.parts["linear"]
    passes = 2
    assert again.parts["normalisation"].launches == kept.parts["normalisation"].launches + 2 * passes
    casts = 3 + 1  # weights, and the last one's bias
    assert again.parts["casts"].launches == kept.parts["casts"].launches + casts * passes


@contextmanager
def allocations() -> Iterator[list[int]]:
    """Bytes that torch's allocator has given out, after each time it gave some or took some back."""
    sizes: list[int] = []
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        yield sizes
    events = [each for each in profiled.profiler.kineto_results.events() if each.name() == "[memory]"]
    sizes += accumulate(each.nbytes() for each in sorted(events, key=lambda each: each.start_ns()))


@pytest.mark.parametrize(
    ("case", "engine"),
    [
        ("two views", {"precision": "fp32"}),
        ("two views", {"precision": "bf16", "recompute_projector": True}),
        ("multi-crop", {"precision": "fp32"}),
        ("LARS", {"precision": "bf16", "zero_stage": 2}),
    ],
)
def test_memory_is_what_the_allocator_gives_the_same_step(case, engine):
    """On the branches of the CPU, which can be computed here."""
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        # Without bf16 in hardware a convolution makes a matrix of patches, memory of its own that no count knows.
        engine = {**engine, "precision": "fp32"}
    changes = CASES[case] | {"engine": {**CASES[case].get("engine", {}), **engine}}
    config = configured(1, images=8, **changes)
    with thin(stages=1), ExitStack() as stack:
        counted = walk(config, 1, CARD, as_cuda=False).peak
        with allocations() as lasting:
            trainer, batches = stack.enter_context(prepared(config, 1))
            trainer.step(0, iter(batches))
        with allocations() as passing:
            trainer.step(1, iter(batches))
    views = sum(view.nbytes for batch in batches for view in batch.views)
    most = counted.pop("activations, gradients and what passes")
    assert max(passing) == pytest.approx(most, rel=0.1)
    assert lasting[-1] - views == pytest.approx(sum(counted.values()), rel=0.1)


def test_what_cannot_be_walked_is_refused():
    with pytest.raises(UserError, match=r"engine\.target_stream = true: the dry run"):
        walk(configured(1, engine={"target_stream": True}), 1, CARD)
    with pytest.raises(UserError, match=r"engine\.compile = true: the dry run"):
        walk(configured(1, engine={"compile": True}), 1, CARD)
    with pytest.raises(UserError, match="card = abacus: unknown; use one of h100, h200, b200, a100"):
        Card.of("abacus")
    with pytest.raises(UserError, match="does not divide"):
        walk(configured(1, images=5), 2, CARD)


@pytest.mark.parametrize(("case", "ranks"), [("CutMix", 8), ("LARS", 1), ("AdamW", 8), ("MoCo", 1), ("multi-crop", 8)])
def test_plain_torch_on_an_older_gpu_makes_the_host_wait_as_little(case, ranks):
    with thin(stages=1):
        found = walk(configured(ranks, **CASES[case], engine={"precision": "fp32"}), ranks, Card.of("t4"))
    assert found.waits == [] and found.parts["convolution"].flops > 0
    assert found.parts["normalisation"].launches == 0 or ranks > 1, "torch's own on one rank"


@pytest.mark.slow
def test_without_tritons_kernels_a_step_takes_as_long_as_doctor_says():
    tree = {"output": "/nowhere", "data": {"train": "/nowhere", "batch_size": 64}, "engine": {"precision": "bf16"}}
    config, card = resolve("imagenet_100ep", tree), Card.of("t4")
    plain, fused = (walk(config, 1, replace(card, capability=each)).of_card for each in ((7, 5), (8, 0)))
    assert plain / fused == pytest.approx(WITHOUT_TRITON, abs=0.05)


def test_times_follow_the_cards_figures():
    found = walked(configured(1), 1)
    slower = found.on(replace(CARD, convolution=CARD.convolution / 1000))
    assert slower.parts["convolution"].seconds > found.parts["convolution"].seconds
    assert slower.parts["linear"] == found.parts["linear"] and slower.of_card > found.of_card
    for work in (Work("convolution", "online", flops=10**12, convolves=True), Work("other", "online", read=10**9)):
        slow, fast = (work.seconds(card) for card in CARD.ends())
        assert fast < work.seconds(CARD) < slow


def test_totals_are_added_up_once_and_anew_for_another_card():
    found = walked(configured(8), 8)
    other = found.on(replace(CARD, launch=1.0))
    assert found.parts is found.parts and found.collectives is found.collectives
    assert other.parts["linear"].seconds >= other.parts["linear"].launches > found.parts["linear"].seconds


def test_every_card_has_figures_with_a_source_and_a_range_around_the_middle():
    text = resources.files("unigrad_fast").joinpath("cards.json").read_text(encoding="utf-8")
    assert json.loads(text)["cards"].keys() == set(get_args(CardName))
    for name, figures in json.loads(text)["cards"].items():
        card = Card.of(name)
        assert all(isinstance(value[-1], str) for key, value in figures.items() if key != "name")
        for (slow, fast), middle in zip(
            zip(card.slowest, card.fastest, strict=True), (card.convolution, card.memory), strict=True
        ):
            assert slow < middle < fast
        assert card.convolution < card.product and card.collective > card.launch


def test_a_kernel_takes_the_longest_of_its_limits_and_waits_for_what_is_merged():
    bytes_of, full = 1 << 30, 4 * CARD.multiprocessors
    alone = Work("normalisation", "online", read=bytes_of)
    assert alone.seconds(CARD) == bytes_of / CARD.memory
    for programs in (1, full // 8, full, 100 * full):  # no more bytes on their way than fit on the card
        filled = replace(alone, programs=programs, resident=4, at_once=4096)
        on_their_way = 4096 * min(programs, full)
        expected = max(alone.seconds(CARD), bytes_of * CARD.latency / on_their_way)
        assert filled.seconds(CARD) == pytest.approx(expected)
        assert replace(filled, merges=16).seconds(CARD) == pytest.approx(expected + 16 * CARD.latency)
    assert replace(alone, read=1, launches=3).seconds(CARD) == 3 * CARD.launch


def test_the_hosts_calls_are_those_of_the_step():
    """Of each kind as many as the network and the reduction have, phase by phase."""
    found = walked(configured(8), 8)
    with thin(stages=1):
        encoder = training.build_encoder(configured(8).model, 0, torch.device("meta"))
    calls = found.calls
    assert calls["backward"]["function of backward"] == calls["online"]["function"] + calls["objective"]["function"]
    assert calls["online"]["function"] == NORMS, "in lockstep this phase holds both branches"
    assert calls["backward"]["hook"] == len(list(encoder.parameters()))
    assert calls["online"]["module"] > 4 * NORMS and calls["backward"]["module"] == 0
    of_all = {kind: sum(each[kind] for each in calls.values()) for kind in HOST.calls}
    assert of_all["collective"] == of_all["enqueue"] == found.collective_count
    assert of_all["launch"] + of_all["enqueue"] == found.launches
    assert {kind for each in calls.values() for kind in each} <= HOST.calls.keys()


def asking(self, online, target, mix=None):
    assert all(online[0].device == target[0].device for _ in range(100))
    return _forward(self, online, target, mix)


def test_asking_a_tensor_for_its_device_is_no_call():
    with thin(stages=1), mock.patch.object(UniGrad, "forward", asking):
        found = walk(configured(8), 8, CARD)
    assert found.calls == walked(configured(8), 8).calls


def test_a_replayed_step_leaves_the_host_what_its_graph_does_not_hold():
    found = walked(configured(8), 8)
    launched, replayed = found.host_by_phase(HOST), found.host_by_phase(HOST, replayed=True)
    assert replayed == {"data": launched["data"], "graph": HOST.graph}
    assert found.of_host(HOST, replayed=True) < found.of_host(HOST) / 3
    assert found.seconds(HOST) == found.of_host(HOST) > found.of_card, "a thin network is the host's affair"
    assert found.seconds(HOST, replayed=True) == found.of_card
    with thin(stages=1):
        assert walk(configured(8, engine={"cuda_graph": True}), 8, CARD).of_host(HOST) == found.of_host(HOST)


def listing(self, online, target, mix=None):
    dist.all_gather([torch.empty(5) for _ in range(8)], torch.empty(5))
    return _forward(self, online, target, mix)


def test_a_gather_into_a_list_is_copied_rank_by_rank():
    with thin(stages=1), mock.patch.object(UniGrad, "forward", listing):
        found = walk(configured(8), 8, CARD)
    copied = found.parts["copies"]
    assert copied.launches == 8 and copied.read == copied.written == 8 * 20


@pytest.mark.parametrize("case", CASES)
def test_no_step_gathers_into_a_list(case):
    assert walked(configured(8, **CASES[case]), 8).parts["copies"].launches == 0


def test_norms_exchange_the_statistics_of_their_channels_and_one_count_for_each_group_and_branch():
    found, groups = walked(configured(8), 8), 2
    with thin(stages=1):
        encoder = training.build_encoder(configured(8).model, 0, torch.device("meta"))
    widths = [module.num_features for module in encoder.modules() if isinstance(module, GroupedBatchNorm)]
    branches = 2
    gathered, summed = (
        sorted(each.bytes for each in found.each_collective if each.kind == kind and each.whose == "norms")
        for kind in ("gather", "reduce")
    )
    assert gathered == sorted(8 * 8 * branches * groups * (2 * width + 1) for width in widths)
    assert summed == sorted(8 * groups * 2 * width for width in widths)


def test_a_count_is_of_the_card_whatever_this_processor_has(monkeypatch):
    def counted(has_bf16: bool) -> Walk:
        monkeypatch.setattr(precision, "has_fast_bf16", lambda device: has_bf16)
        with thin(stages=1):
            return walk(configured(1), 1, CARD)

    without, with_bf16 = counted(False), counted(True)
    assert without.parts == with_bf16.parts and without.peak == with_bf16.peak
    assert without.parts["casts"].launches > 0


def test_weights_of_other_layout_at_stage_1_cost_conversions_and_launches_of_the_target_update():
    """At stage 0 all weights are channels-last; at stage 1 only the target's, as DeepSpeed's flat tensors are not."""
    whole, flat = (walked(configured(1, engine={"zero_stage": stage}), 1) for stage in (0, 1))
    with thin(stages=1):
        encoder = training.build_encoder(configured(1).model, 0, torch.device("cpu"))
    odd = [m.weight for m in encoder.modules() if isinstance(m, nn.Conv2d) and m.kernel_size != (1, 1)]
    assert len(odd) == 3
    conversions = [sum(each.launches for each in found.work if each.part == "copies") for found in (whole, flat)]
    assert conversions == [0, 2 * len(odd) - 1]  # the first convolution has no gradient of its images
    # Besides the fused launch a lerp each, their copies in bf16, and the weight that they share.
    assert flat.parts["target"].launches > whole.parts["target"].launches + len(odd) + 1


def test_a_card_without_bf16_is_counted_in_fp16():
    taken: list[torch.dtype | None] = []

    def noting(config, encoder, dtype):
        taken.append(dtype)
        return build_branch(config, encoder, dtype)

    build_branch = training.build_branch
    with thin(stages=1), mock.patch.object(training, "build_branch", noting):
        for card in (CARD, replace(CARD, capability=(7, 5))):
            walk(configured(1), 1, card)
    assert taken == [torch.bfloat16, torch.float16]


def test_without_a_momentum_target_a_step_launches_less_and_keeps_no_copy():
    found = {
        "momentum": walked(configured(8), 8),
        "stop_gradient": walked(configured(8, objective={"target": "stop_gradient"}), 8),
    }
    assert found["momentum"].peak["target"] > 0 == found["stop_gradient"].peak["target"]
    one, both = (found[target].parts["convolution"].launches for target in ("stop_gradient", "momentum"))
    # With backward for inputs and weights, but for the first one's input, it is thrice as much.
    assert 3 * (both - one) - 1 == one


def test_a_method_whose_eigenvectors_the_host_waits_for_is_refused():
    with pytest.raises(UserError, match=r"objective\.method = byol_directpred: .*; use another method"):
        walk(configured(1, objective={"row": "d"}), 1, CARD)
