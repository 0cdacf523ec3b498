"""The sweep of linear classifiers: each head is what it would be alone, and the choice is made on what it says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from test_linear import AskedToLeave, Spectrum, probe
from thin import thin
from torch import Tensor, nn

from unigrad_fast.evaluation import linear_paper
from unigrad_fast.evaluation.linear import FrozenEncoder
from unigrad_fast.evaluation.linear_sweep import COUNT, RATES, STAGES, Heads, Sweep, without_held_out
from unigrad_fast.evaluation.linear_training import Method, ProbeSchedule, train
from unigrad_fast.evaluation.samples import HELD_OUT
from unigrad_fast.evaluation.unfinished import Unfinished
from unigrad_fast.networks.backbones import build_backbone
from unigrad_fast.networks.batch_norm import convert
from unigrad_fast.networks.residual import fuse
from unigrad_fast.optimization.sgd import SGD
from unigrad_fast.pipelines.manifest import part
from unigrad_fast.runtime.errors import Preempted, UserError

SCHEDULE = ProbeSchedule(epochs=3, batch_size=48, base_lr=30.0)


class TwoStages(Spectrum):
    """The frequencies as the last stage, and the mean colours before it."""

    def last_stages(self, images: Tensor, stages: int) -> Tensor:
        assert stages == 2
        return torch.cat([images.mean((2, 3)), self(images)], dim=1)


def made(data: Path, lines: list[str], stage: int = 0) -> FrozenEncoder:
    return probe(data, TwoStages(), say=lines.append, stage=stage)


def swept(data: Path, choose: str, folder: Path | None = None, interrupted: bool = False, stage: int = 0) -> tuple:
    lines: list[str] = []
    sweep = Sweep(made(data, lines, stage), choose)
    unfinished = None if folder is None else Unfinished(folder, "sweep", {}, lines.append)
    if interrupted:
        with pytest.raises(Preempted):
            train(sweep.encoder, SCHEDULE, sweep.method, unfinished, AskedToLeave())
    heads = train(sweep.encoder, SCHEDULE, sweep.method, unfinished)
    return sweep.judge(heads, SCHEDULE.base_lr), {name: each.detach() for name, each in heads.named_parameters()}, lines


def alone(data: Path, stages: int, rate: float) -> Tensor:
    """The weight of a classifier that is trained alone."""
    encoder = made(data, [])
    sweep = Sweep(encoder, "val")
    heads = Heads([encoder.width(), sweep.encoder.width()], 6, encoder.config.seed)

    def build(width: int, classes: int, seed: int) -> nn.Module:
        return heads.head(STAGES.index(stages) * len(RATES))

    backbone = encoder.backbone if stages == 1 else sweep.encoder.backbone
    method = Method(build, lambda parameters, lr: SGD(parameters, lr=lr, momentum=0.9), kind="cosine")
    return train(replace(encoder, backbone=backbone), replace(SCHEDULE, base_lr=rate), method).weight.detach()


@pytest.mark.parametrize(("stages", "number"), [(1, 0), (1, 12), (2, 7), (2, 12)])
def test_a_head_is_the_classifier_that_is_trained_alone(data, workers, stages, number):
    ((_, weights, _),) = workers(1).run(swept, data, "val")
    rate = RATES[number] * SCHEDULE.base_lr / max(RATES)
    (expected,) = workers(1).run(alone, data, stages, rate)
    found = weights[f"weights.{STAGES.index(stages)}"][number]
    # Six steps; a loss times a share rounds otherwise than a rate times it: some units in the last place of each.
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item())


def test_any_number_of_ranks_and_an_interruption_give_the_same(data, workers, tmp_path):
    ((judged, weights, lines),) = workers(1).run(swept, data, "val")
    assert len(lines) == SCHEDULE.epochs and all(line.endswith(f"(the best of {COUNT} classifiers)") for line in lines)
    assert judged.images == 103 and judged.accuracy == max(head["accuracy"] for head in judged.figures["heads"]) > 30
    others = [(3, None, False, 0), (3, None, False, 2), (2, tmp_path, True, 1)]  # the last with the ZeRO stage
    for ranks, *given in others:
        for _, found, _ in workers(ranks).run(swept, data, "val", *given):
            for name, expected in weights.items():
                assert (found[name] - expected).norm() <= 1e-4 * expected.norm(), name
    two = workers(2).run(swept, data, "val", tmp_path / "whole")
    again = workers(2).run(swept, data, "val", tmp_path / "parts", True)
    for (_, one, _), (_, other, said) in zip(two, again, strict=True):
        assert "continuing an interrupted call after epoch 1.5 of 3" in said
        assert all(torch.equal(other[name], each) for name, each in one.items())


def chosen_with(data: Path, shuffled: bool, choose: str) -> tuple[dict, int]:
    encoder = made(data, [])
    if shuffled:
        labels = np.random.default_rng(0).permutation(encoder.val.labels)
        encoder = replace(encoder, val=part(encoder.val, np.arange(len(labels)), labels, encoder.val.classes))
    sweep = Sweep(encoder, choose)
    judged = sweep.judge(train(sweep.encoder, SCHEDULE, sweep.method), SCHEDULE.base_lr)
    return judged.figures["chosen"], judged.images


def test_a_choice_on_training_images_does_not_see_the_validation_images(data, workers):
    ((chosen, images),) = workers(1).run(chosen_with, data, False, "train")
    assert workers(1).run(chosen_with, data, True, "train") == [(chosen, 103)] and images == 103
    ((other, _),) = workers(1).run(chosen_with, data, True, "val")
    assert other["accuracy"] != chosen["accuracy"]


def split(data: Path, seed: int) -> tuple[list, list, list]:
    encoder = made(data, [])
    encoder = replace(encoder, config=encoder.config.model_copy(update={"seed": seed}))
    kept = without_held_out(encoder)
    paths = [[manifest.path(i) for i in range(len(manifest))] for manifest in (encoder.train, kept.train, kept.val)]
    assert [Path(path).parent.name for path in paths[2]] == [kept.val.classes[label] for label in kept.val.labels]
    return tuple(paths)


def test_a_tenth_of_each_class_is_held_out(data, workers):
    ((everything, kept, held),) = workers(1).run(split, data, 0)
    assert sorted(kept + held) == sorted(everything) and not set(kept) & set(held)
    assert [Path(path).parent.name for path in held] == [f"class{number}" for number in range(6)]  # of 16 images each
    assert int(16 * HELD_OUT) == 1
    assert workers(1).run(split, data, 0)[0] == (everything, kept, held) != workers(1).run(split, data, 1)[0]


def test_features_of_the_last_stages_are_pooled_and_joined():
    with thin():
        backbone = build_backbone("resnet18")
    images = torch.randn(2, 3, 64, 64)
    seen = []
    for layer in (backbone.layer3, backbone.layer4):
        layer[-1].register_forward_hook(lambda module, inputs, output: seen.append(output.mean((2, 3))))
    expected = backbone.eval()(images)
    convert(backbone)
    fuse(backbone, nn.Sequential())
    torch.testing.assert_close(backbone.last_stages(images, 2), torch.cat(seen[:2], dim=1))
    assert torch.equal(backbone.last_stages(images, 1), backbone(images))
    torch.testing.assert_close(backbone(images), expected)


def test_a_backbone_without_stages_is_refused(data, workers):
    assert workers(1).run(refused, data) == [
        "protocol = sweep: this backbone has no features of stages; use quick or paper"
    ]


def refused(data: Path) -> str:
    with pytest.raises(UserError) as caught:
        Sweep(probe(data), "val")
    return str(caught.value)


@pytest.mark.parametrize(
    ("base_lr", "largest", "said"),
    [
        (30.0, True, "; this is the largest rate, so try --base_lr 300"),
        (0.1, True, "; this is the largest rate, so try --base_lr 1"),
        (30.0, False, ""),
    ],
)
def test_a_choice_at_the_end_of_the_rates_says_so(data, workers, base_lr, largest, said):
    assert workers(1).run(judged_with, data, base_lr, largest)[0].endswith(f"per 256 images{said}")


def judged_with(data: Path, base_lr: float, largest: bool) -> str:
    """What is said where one head is better than the others, which is of the largest or of the least rate."""
    encoder = made(data, [])
    sweep, best = Sweep(encoder, "val"), -1 if largest else 0
    heads = Heads([encoder.width(), sweep.encoder.width()], 6, 0)
    single = Method(linear_paper.new_classifier, lambda parameters, lr: SGD(parameters, lr=lr, momentum=0.9), "cosine")
    trained = train(encoder, SCHEDULE, single).weight.detach()
    with torch.no_grad():
        for weight in heads.weights:
            weight.zero_()
        heads.weights[0][best] = trained
    return sweep.judge(heads, base_lr).said
