"""A trainer for tests on any number of ranks, and all of its state as tensors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unigrad_fast.config import Config, resolve
from unigrad_fast.distributed import World
from unigrad_fast.pipelines import Batch, Manifest
from unigrad_fast.training.trainer import Trainer


def small_config(images: str, **overrides) -> Config:
    """ResNet-18 at 32 pixels in fp32, with the learning rate of the `cifar_subset` recipe; 3 steps per epoch."""
    tree = {
        "data": {"train": images, "batch_size": 32, "threads": 1},
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


def make_trainer(config: Config) -> Trainer:
    """A trainer in the process group of the test's workers."""
    rank, size = dist.get_rank(), dist.get_world_size()
    world = World(rank, size, rank, size, torch.device("cpu"), "gloo")
    return Trainer(config, world, Manifest.from_folder(Path(config.data.train)))


def batches(trainer: Trainer, start_step: int = 0) -> Iterator[Batch]:
    return trainer.loader.iterate(start_step=start_step * trainer.accumulation)


def state(trainer: Trainer) -> dict[str, dict[str, Tensor]]:
    """Copies of everything that a step may change, by part and name."""
    online = trainer.online.module
    momentum = {
        name: trainer.optimizer.state[parameter]["momentum_buffer"]
        for name, parameter in online.named_parameters()
        if trainer.optimizer.state[parameter]
    }
    parts = {
        "parameters": dict(online.named_parameters()),
        "buffers": dict(online.named_buffers()),
        "momentum": momentum,
        "target_parameters": dict(trainer.target.named_parameters()),
        "target_buffers": dict(trainer.target.named_buffers()),
        "objective": dict(trainer.objective.named_buffers()),
    }
    return {part: {name: t.detach().clone() for name, t in tensors.items()} for part, tensors in parts.items()}


def smooth(trainer: Trainer) -> Trainer:
    """The trainer with SiLU in place of ReLU, whose kink turns rounding into jumps of the gradient."""
    for branch in (trainer.online.module, trainer.target):
        for module in list(branch.modules()):
            for name, child in module.named_children():
                if isinstance(child, nn.ReLU):
                    setattr(module, name, nn.SiLU())
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
