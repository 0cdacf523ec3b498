"""The pass before the first step changes nothing of a run."""

from __future__ import annotations

from itertools import islice

import pytest
import torch
from trainer_state import batches, changed, make_trainer, small_config, state

SETTINGS = {
    "data__recipe": "multicrop",
    "data__image_size": 32,
    "data__local_crops": 2,
    "data__local_views": {"size": 16},
    "data__cutmix": {"probability": 1.0, "group": 4},
    "engine__accumulation_steps": 2,
}


def warm_up_between_steps(images: str, stage: int) -> dict[str, dict[str, list[str]]]:
    """What differs after it, and after one more step, from a run that had none. Both take the same batches."""
    warmed, other = (
        make_trainer(small_config(images, engine__zero_stage=stage, **SETTINGS), stages=1) for _ in range(2)
    )
    sizes, found = [], {}
    warmed.online.module.register_forward_pre_hook(lambda _, inputs: sizes.append([x.shape[-1] for x in inputs[0]]))
    given = list(islice(batches(warmed), 4))
    streams = iter(given), iter(given)
    for step in range(2):
        before, generator = state(warmed), torch.random.get_rng_state()
        gradients = [None if p.grad is None else p.grad.clone() for p in warmed.online.module.parameters()]
        sizes.clear()
        warmed.warm_up()
        assert sizes == [[32, 32, 16, 16]]
        assert torch.equal(generator, torch.random.get_rng_state())
        for parameter, gradient in zip(warmed.online.module.parameters(), gradients, strict=True):
            assert (parameter.grad is None) == (gradient is None)
            assert gradient is None or torch.equal(parameter.grad, gradient)
        found[f"warm-up before step {step}"] = changed(before, state(warmed))
        for trainer, stream in zip((warmed, other), streams, strict=True):
            trainer.step(step, stream)
        found[f"step {step}"] = changed(state(other), state(warmed))
    return {what: differing for what, differing in found.items() if differing}


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_the_warm_up_leaves_no_trace(images, workers, stage):
    assert workers(2).run(warm_up_between_steps, str(images), stage) == [{}] * 2
