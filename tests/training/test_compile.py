"""`engine.compile`: a compiled run is the run."""

from __future__ import annotations

import shutil
from functools import partialmethod
from unittest import mock

import pytest
import torch
from torch import nn
from trainer_state import batches, make_trainer, small_config, state

from unigrad_fast.config import resolve
from unigrad_fast.runtime.errors import UserError
from unigrad_fast.training.trainer import require_compiler

MULTICROP = {
    "data__recipe": "multicrop",
    "data__image_size": 32,
    "data__local_crops": 2,
    "data__local_views": {"size": 16},
}


def distances(images: str, backend: str, settings: dict) -> dict[str, float]:
    """How far two steps of a compiled trainer lead from those of another, as a share of a tensor's largest number."""
    torch.compiler.reset()
    compiled = partialmethod(nn.Module.compile, backend=backend, fullgraph=True)
    with mock.patch.object(nn.Module, "compile", compiled):
        trainers = [make_trainer(small_config(images, engine__compile=on, **settings)) for on in (True, False)]
    for trainer in trainers:
        stream = batches(trainer)
        for step in range(2):
            trainer.step(step, stream)
    found, expected = map(state, trainers)
    furthest = {}
    for part, tensors in expected.items():
        assert found[part].keys() == tensors.keys()
        furthest[part] = max(
            ((found[part][name] - value).abs().max() / value.abs().max().clamp_min(1e-9)).item()
            for name, value in tensors.items()
            if value.numel()
        )
    return furthest


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        pytest.param(1, {}, id="one rank", marks=pytest.mark.slow),
        pytest.param(1, {"engine__zero_stage": 2, **MULTICROP}, id="multi-crop", marks=pytest.mark.slow),
        pytest.param(2, {"model__sync_batch_norm": False}, id="two ranks", marks=pytest.mark.slow),
    ],
)
def test_compiled_networks_are_one_graph_each_with_the_same_numbers(images, workers, ranks, settings):
    for furthest in workers(ranks).run(distances, str(images), "aot_eager", settings):
        assert set(furthest.values()) == {0.0}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_compiled_code_is_the_run_up_to_rounding(images, workers):
    group = workers(1)
    group.timeout = 600
    (furthest,) = group.run(distances, str(images), "inductor", {})
    assert 0 < max(furthest.values()) < 1e-3


def test_a_missing_compiler_is_said_at_the_start(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UserError, match="C\\+\\+ compiler no-such-compiler not found; install one, name yours in CXX"):
        require_compiler(resolve(overrides={"engine": {"compile": True}}), 1)
