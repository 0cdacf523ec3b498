"""A trainer for tests on any number of ranks, and all of its state as tensors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from thin import smooth_, thin
from torch import Tensor

from unigrad_fast.config import Config, resolve
from unigrad_fast.pipelines import Batch, Manifest
from unigrad_fast.runtime.process_group import World
from unigrad_fast.training import checkpoint
from unigrad_fast.training.trainer import Trainer


def small_config(images: str, **overrides) -> Config:
    """A thin ResNet at 16 pixels in fp32, with the learning rate of the `cifar_subset` recipe; 3 steps per epoch."""
    tree = {
        "data": {"train": images, "batch_size": 32, "image_size": 16, "threads": 1},
        "model": {"projector": {"depth": 3, "width": 32}},
        "objective": {"correlation_source": "target"},
        "optimizer": {"base_lr": 3.2},
        "engine": {"precision": "fp32"},
        "schedule": {"epochs": 8},
        "telemetry": {"tensorboard": False, "every": 1, "effective_rank_every": 1},
    }
    for key, value in overrides.items():
        group, _, leaf = key.partition("__")
        tree.setdefault(group, {})[leaf] = value
    return resolve("cifar_subset", tree)


def make_trainer(config: Config, blocks: int = 1, stages: int = 4) -> Trainer:
    """A trainer in the process group of the test's workers, with a thin network."""
    rank, size = dist.get_rank(), dist.get_world_size()
    world = World(rank, size, rank, size, torch.device("cpu"), "gloo")
    with thin(blocks, stages):
        return Trainer(config, world, Manifest.from_folder(Path(config.data.train)))


def batches(trainer: Trainer, start_step: int = 0) -> Iterator[Batch]:
    return trainer.loader.iterate(start_step=start_step * trainer.accumulation)


def state(trainer: Trainer) -> dict[str, dict[str, Tensor]]:
    """Copies of everything that a step may change, as this rank holds it, by part and name."""
    parts: dict[str, dict[str, Tensor]] = {
        "parameters": {}, "buffers": {}, "momentum": {}, "target_parameters": {}, "target_buffers": {}, "objective": {}
    }  # fmt: skip
    weights = {name for name, _ in trainer.online.module.named_parameters()}
    prefixes = {"online": "", "target": "target_"}
    for fragment in checkpoint.state(trainer):
        part, _, name = fragment.name.partition(".")
        if part in prefixes:
            part = prefixes[part] + ("parameters" if name in weights else "buffers")
        if part in parts:
            parts[part][name] = fragment.tensor.detach().clone()
    # What the forward pass reads, which at stages 1 and 2 is not what the optimizer moves.
    parts["weights"] = {name: p.detach().clone() for name, p in trainer.online.module.named_parameters()}
    return parts


def smooth(trainer: Trainer) -> Trainer:
    """The trainer without ReLU."""
    for branch in (trainer.online.module, trainer.target):
        smooth_(branch)
    return trainer


def changed(before: dict[str, dict[str, Tensor]], after: dict[str, dict[str, Tensor]]) -> dict[str, list[str]]:
    """Names of the tensors that differ in a single bit, by part; parts without one are left out."""
    differing = {
        part: [
            name
            for name, value in after[part].items()
            if not torch.equal(value, before[part].get(name, torch.zeros_like(value)))
        ]
        for part in after
    }
    return {part: names for part, names in differing.items() if names}
