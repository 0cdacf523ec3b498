"""The collectives that the dry run counts are those that ranks give to a real process group."""

from __future__ import annotations

import pytest
from thin import thin
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from trainer_state import batches, make_trainer, small_config

from unigrad_fast.config import Config
from unigrad_fast.dry_run import COLLECTIVES, Card, walk


class Spy(TorchDispatchMode):
    """Collectives, and the largest tensor of each, as a real step gives them to the process group."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, list[int]] = {}

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        name = operator._schema.name
        if name.startswith("c10d::"):
            sizes = [t.nbytes for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
            self.found.setdefault(COLLECTIVES[name.partition("::")[2]], []).append(max(sizes))
        return operator(*args, **(kwargs or {}))


def spied(images: str, settings: dict) -> tuple[Config, dict[str, list[int]]]:
    """The second step of a run; both global views pass together, as they do on a GPU."""
    trainer = make_trainer(small_config(images, model__batch_statistics="per_size", **settings))
    stream = batches(trainer)
    trainer.step(0, stream)
    with Spy() as spy:
        trainer.step(1, stream)
    return trainer.config, spy.found


LARS = {"name": "lars", "exclude_bias_and_norm": True, "bias_base_lr": 0.1}


@pytest.mark.parametrize(
    "settings",
    [
        {"engine": {"zero_stage": 1, "accumulation_steps": 2}},
        {
            "engine": {"zero_stage": 2, "accumulation_steps": 2},
            "optimizer": LARS,
            "objective": {"placement": "sharded"},
        },
    ],
    ids=["stage 1", "stage 2, LARS, sharded"],
)
def test_collectives_are_those_of_two_ranks_that_meet(images, workers, settings):
    flat = {f"{group}__{key}": value for group, values in settings.items() for key, value in values.items()}
    (config, sizes), other = workers(2).run(spied, str(images), flat)
    assert other == (config, sizes)
    with thin():
        counted = walk(config, 2, Card.of("h100")).collectives
    assert {kind: (each.count, each.bytes) for kind, each in counted.items()} == {
        kind: (len(each), sum(each)) for kind, each in sizes.items()
    }
