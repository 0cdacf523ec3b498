"""Passes in lockstep are passes in turn, bit for bit, with half the gathers."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from thin import thin

from unigrad_fast.config import resolve
from unigrad_fast.networks.encoder import Encoder, build_encoder
from unigrad_fast.networks.lockstep import together
from unigrad_fast.runtime.collectives import CollectiveSpy

VIEWS = {
    "two views": [(3, 16), (3, 16)],
    "multi-crop": [(3, 16), (3, 16), (3, 8), (3, 8), (3, 8)],
    "more of the target": [(3, 16)],
}


def encoder(backbone: str) -> Encoder:
    with thin(stages=2):
        overrides = {"model": {"backbone": backbone, "projector": {"depth": 3, "width": 8}}, "data": {"train": "x"}}
        return build_encoder(resolve(overrides=overrides).model, 0, torch.device("cpu"))


def outcome(in_lockstep: bool, backbone: str, case: str, one_pass: bool, recompute: bool) -> tuple[dict, int]:
    """Embeddings of both branches, gradients and buffers after two passes; gathers of the second."""
    torch.manual_seed(torch.distributed.get_rank())
    online = encoder(backbone)
    target = copy.deepcopy(online).requires_grad_(False)
    if recompute:
        online.recompute_projector()
    online.one_pass = target.one_pass = one_pass
    views = [torch.randn(images, 3, size, size) for images, size in VIEWS[case]]
    unmixed = [torch.randn(3, 3, 16, 16) for _ in range(2)]
    for step in range(2):
        spy = CollectiveSpy() if step else nullcontext()
        with spy:
            if in_lockstep:
                ours, theirs = online(views, lambda steps: target(unmixed, partial(together, online=steps)))
            else:
                with torch.no_grad():
                    ours = target(unmixed)
                theirs = online(views)
        assert all(each.requires_grad for each in theirs) and not any(each.requires_grad for each in ours)
    sum((each * each).sum() for each in theirs).backward()
    found = {f"online {i}": each.detach() for i, each in enumerate(theirs)}
    found |= {f"target {i}": each for i, each in enumerate(ours)}
    found |= {name: parameter.grad for name, parameter in online.named_parameters()}
    found |= {f"{i} {name}": each for i, branch in enumerate((online, target)) for name, each in branch.named_buffers()}
    return found, spy.found["gather"].count


@pytest.mark.parametrize(
    ("backbone", "case", "one_pass", "recompute"),
    [
        ("resnet18", "two views", False, False),
        ("resnet50", "two views", True, True),
        ("resnet50", "multi-crop", False, True),
        ("resnet18", "multi-crop", True, False),
        ("resnet18", "more of the target", False, False),
    ],
)
def test_lockstep_is_turn_after_turn_with_half_the_gathers(workers, backbone, case, one_pass, recompute):
    arguments = backbone, case, one_pass, recompute
    for (expected, before), (found, after) in zip(
        workers(2).run(outcome, False, *arguments), workers(2).run(outcome, True, *arguments), strict=True
    ):
        assert found.keys() == expected.keys()
        assert not [name for name, each in expected.items() if not torch.equal(found[name], each)]
        of_target, of_online = passes(case, one_pass)
        norms, rest = divmod(before, of_target + of_online)
        assert rest == 0 and norms > 5
        assert after == norms * max(of_target, of_online)


def passes(case: str, one_pass: bool) -> tuple[int, int]:
    """Of the target and of the online branch."""
    return (1 if one_pass else 2), {"two views": 1 if one_pass else 2, "multi-crop": 2 if one_pass else 3}.get(case, 1)
