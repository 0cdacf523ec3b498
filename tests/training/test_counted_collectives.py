"""The collectives that the dry run counts are those that ranks give to a real process group."""

from __future__ import annotations

import pytest
from thin import thin
from trainer_state import batches, make_trainer, small_config

from unigrad_fast.config import Config
from unigrad_fast.dry_run.cards import Card
from unigrad_fast.dry_run.walking import walk
from unigrad_fast.runtime.collectives import CollectiveSpy, Sum


class NamingSpy(CollectiveSpy):
    """Also knows the operators' names."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.names.add(operator._schema.name)
        return super().__torch_dispatch__(operator, types, args, kwargs)


def spied(images: str, settings: dict) -> tuple[Config, dict[str, Sum]]:
    """The second step of a run; both global views pass together, as they do on a GPU."""
    trainer = make_trainer(small_config(images, model__batch_statistics="per_size", **settings), stages=1)
    stream = batches(trainer)
    trainer.step(0, stream)
    with NamingSpy() as spy:
        trainer.step(1, stream)
    assert spy.names and not spy.names & {"c10d::allgather_", "c10d::allgather_coalesced_"}, "a gather into a list"
    return trainer.config, dict(spy.found)


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
    (config, found), other = workers(2).run(spied, str(images), flat)
    assert other == (config, found)
    with thin(stages=1):
        counted = walk(config, 2, Card.of("h100")).collectives
    assert {kind: (each.count, each.bytes) for kind, each in counted.items()} == {
        kind: (each.count, each.bytes) for kind, each in found.items()
    }
