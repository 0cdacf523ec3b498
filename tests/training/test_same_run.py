"""What may change when a run is continued."""

import torch
import torch.distributed as dist

from unigrad_fast.config import Config, resolve
from unigrad_fast.runtime.errors import UserError
from unigrad_fast.runtime.process_group import World
from unigrad_fast.training.same_run import contradictions, require_same_everywhere


def test_only_what_decides_the_result_forbids_to_go_on():
    began = resolve().model_dump(mode="json")
    harmless = {
        "output": "/elsewhere",
        "data": {"train": "/moved", "val": "/moved/val", "threads": 3, "decode": "cpu"},
        "engine": {"zero_stage": 2, "max_skipped_steps": 5},
        "checkpoint": {"every": 0.5, "keep": 7, "keep_every": 10},
        "evaluation": {"every": 3, "knn": {"k": 5}},
        "telemetry": {"every": 1, "tensorboard": False},
    }
    assert contradictions(resolve(overrides=harmless), began, "the checkpoint") == []
    changed = {"seed": 3, "schedule": {"epochs": 200}, "model": {"projector": {"width": 4096}}}
    assert contradictions(resolve(overrides=changed), began, "the checkpoint") == [
        "seed = 3: the checkpoint has 0",
        "model.projector.width = 4096: the checkpoint has 2048",
        "schedule.epochs = 200: the checkpoint has 100",
    ]


def test_a_run_that_began_with_a_key_without_effect_goes_on_without_it():
    config = resolve("cifar_subset_simsiam")
    began = config.model_dump(mode="json") | {"target": {"momentum": 0.5, "final_momentum": 1.0}}
    assert contradictions(config, began, "the checkpoint") == []


def refusal(settings: list[Config]) -> str:
    rank = dist.get_rank()
    world = World(rank, 2, rank, 2, torch.device("cpu"), "gloo", hosts=("node0", "node1"))
    try:
        require_same_everywhere(settings[rank], world)
    except UserError as error:
        return str(error)
    return ""


def test_ranks_with_other_settings_are_refused_by_key_on_all_of_them(workers):
    one = resolve(overrides={"data": {"threads": 2, "train": "/here"}})
    same = resolve(overrides={"data": {"threads": 3, "train": "/there"}})
    assert workers(2).run(refusal, [one, same]) == ["", ""]
    other = resolve(overrides={"seed": 7, "optimizer": {"base_lr": 0.07}, "telemetry": {"every": 3}})
    rate = one.optimizer.base_lr
    first, second = workers(2).run(refusal, [one, other])
    assert first == second and first.splitlines() == [
        "seed = 7 on rank 1 (node1): rank 0 (node0) has 0",
        f"optimizer.base_lr = 0.07 on rank 1 (node1): rank 0 (node0) has {rate}",
        "telemetry.every = 3 on rank 1 (node1): rank 0 (node0) has null",
        "start all ranks of a run with the same command",
    ]
