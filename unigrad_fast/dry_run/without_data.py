"""A trainer without images or other ranks, and batches for it."""

from __future__ import annotations

import contextlib
import os
import types
from collections.abc import Iterator
from unittest import mock

import torch
from torch import nn

from unigrad_fast.config import Config
from unigrad_fast.networks.encoder import build_encoder
from unigrad_fast.optimization.gated import Gated
from unigrad_fast.pipelines import Batch
from unigrad_fast.pipelines.cutmix import Mix
from unigrad_fast.runtime import process_group
from unigrad_fast.runtime.process_group import World
from unigrad_fast.runtime.torch_private import init_fake_process_group
from unigrad_fast.training import branches
from unigrad_fast.training import trainer as training
from unigrad_fast.training.fragments import Fragments, PartitionedFragments, WholeFragments


@contextlib.contextmanager
def prepared(config: Config, ranks: int) -> Iterator[tuple[training.Trainer, list[Batch]]]:
    """Rank 0's trainer in a process group without other ranks, and the batches of a step."""
    with _process_group(ranks):
        trainer = build_trainer(config, World(0, ranks, 0, ranks, torch.device("cpu"), "gloo"))
        yield trainer, [batch(config, ranks) for _ in range(config.engine.accumulation_steps)]


@contextlib.contextmanager
def _process_group(ranks: int) -> Iterator[None]:
    """A process group of so many ranks whose collectives send nothing."""
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    with mock.patch.dict(os.environ, variables):
        init_fake_process_group(ranks)
        try:
            yield
        finally:
            process_group.stop()  # DeepSpeed's, too


def build_trainer(config: Config, world: World) -> training.Trainer:
    """A trainer without images."""

    def make_target(online: nn.Module) -> nn.Module:  # a fake tensor cannot be copied deeply
        target = build_encoder(config.model, config.seed, world.device)
        return target.requires_grad_(False).train()

    def build_fragments(engine, optimizer: Gated) -> Fragments:  # their self-check reads values
        return (PartitionedFragments if engine.zero_optimization_stage() else WholeFragments)(engine, optimizer)

    loader = types.SimpleNamespace(steps_per_epoch=1000 * config.engine.accumulation_steps)
    with (
        mock.patch.object(training, "BadImages"),
        mock.patch.object(training, "identity"),
        mock.patch.object(training, "build_loader", return_value=loader),
        mock.patch.object(branches, "make_target", make_target),
        mock.patch.object(process_group, "limit"),  # no other rank to wait for
        mock.patch.object(training, "build_fragments", build_fragments),
        mock.patch.object(nn.Module, "to", lambda module, *_, **__: module),
    ):
        return training.Trainer(config, world, None)


def batch(config: Config, ranks: int) -> Batch:
    """A rank's micro-batch, as the loader yields it on a GPU."""
    images = config.images_at_once(ranks)
    views = [
        torch.empty(images, 3, view.size, view.size).contiguous(memory_format=torch.channels_last)
        for view in config.data.views()
    ]
    mix = None
    if config.data.cutmix.probability:
        partner, ratio = torch.zeros(2, images, dtype=torch.int64), torch.zeros(2, images)
        mix = Mix(partner=partner, ratio=ratio, box=torch.zeros(2, images, 4, dtype=torch.int64))
    nothing = torch.zeros(images, dtype=torch.int64)
    return Batch(views, index=nothing, label=nothing, step=0, replaced=nothing.bool(), mix=mix)
