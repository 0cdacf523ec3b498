"""Walks a training step on fake tensors, with a trainer that has neither images nor other ranks."""

from __future__ import annotations

import contextlib
import os
import types
from collections.abc import Iterator
from functools import partial
from unittest import mock

import torch
from torch import Tensor, nn

from unigrad_fast.config import Config
from unigrad_fast.dry_run.cards import Card
from unigrad_fast.dry_run.counting import Count
from unigrad_fast.dry_run.walked import Walk, Work
from unigrad_fast.kernels.dispatch import as_on_cuda
from unigrad_fast.networks import batch_norm
from unigrad_fast.networks.encoder import build_encoder
from unigrad_fast.optimization.gated import Gated
from unigrad_fast.pipelines import Batch
from unigrad_fast.pipelines.cutmix import Mix
from unigrad_fast.runtime import process_group
from unigrad_fast.runtime.errors import UserError
from unigrad_fast.runtime.process_group import World
from unigrad_fast.runtime.torch_private import (
    FUSED_OPTIMIZERS,
    DataDependentOutputException,
    FakeTensorMode,
    TorchDispatchMode,
    init_fake_process_group,
)
from unigrad_fast.training import branches
from unigrad_fast.training import trainer as training
from unigrad_fast.training.fragments import Fragments, PartitionedFragments, WholeFragments


def require_walkable(config: Config, ranks: int) -> None:
    """Raises UserError if the batch does not divide over the ranks, or for a setting that cannot be walked."""
    if config.engine.target_stream:
        raise UserError("engine.target_stream = true: the dry run does not model overlap; leave it out")
    if config.engine.compile:
        raise UserError("engine.compile = true: the dry run walks the uncompiled step; leave it out")
    if config.objective.takes("eigen_every"):
        raise UserError(
            f"objective.method = {config.objective.method}: the host waits for its eigenvectors, which the dry run "
            "cannot walk; use another method"
        )
    config.check_world(ranks)


def walk(config: Config, ranks: int, card: Card, as_cuda: bool = True) -> Walk:
    """Walks the second step of a run on so many cards, as rank 0 sees it; the first allocates persistent memory.

    Args:
        as_cuda: take the GPU's code paths, otherwise the CPU's, which compute the same in PyTorch.

    Raises:
        UserError: see `require_walkable`.
        RuntimeError: the step reads a tensor's value, or a process group exists already.
    """
    require_walkable(config, ranks)
    engine = config.engine.model_copy(update={"cuda_graph": False})  # the same step, and what its replay takes is known
    if as_cuda and engine.precision == "auto":  # as on the card, whatever this machine's CPU has
        engine = engine.model_copy(update={"precision": card.precision})
    config = config.model_copy(update={"engine": engine})
    found = Walk(card, ranks)
    device = (
        as_on_cuda(card.capability) if as_cuda else mock.patch.object(batch_norm, "host_may_read", lambda tensor: False)
    )
    fake = FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)
    with device, fake, _Fused(), prepared(config, ranks) as (trainer, batches):
        try:
            with _spies(found):
                trainer.step(0, iter(batches))
                found.waits.clear()
                with Count(found, trainer):
                    trainer.step(1, iter(batches))
        except DataDependentOutputException as error:
            raise RuntimeError(f"the step reads a value ({error.func}), for which the host waits") from error
    views = config.data.views()
    images = config.images_at_once(ranks) * config.engine.accumulation_steps
    found.calls["data"]["image"] += images
    pixels = images * sum(view.size**2 for view in views)
    found.work.append(Work("loader", "data", 0, own=card.view * pixels / 224**2))
    return found


@contextlib.contextmanager
def _spies(found: Walk) -> Iterator[None]:
    """Records calls that wait for the device without reading a value."""
    waiting = {
        "torch.cuda.synchronize": torch.cuda,
        "Event.synchronize": torch.cuda.Event,
        "Stream.synchronize": torch.cuda.Stream,
        "Tensor.cpu": Tensor,
        "Tensor.numpy": Tensor,
    }

    def note(name: str, *_: object, **__: object) -> None:
        found.waits.append(name)

    with contextlib.ExitStack() as stack:
        for name, owner in waiting.items():
            stack.enter_context(mock.patch.object(owner, name.rpartition(".")[2], partial(note, name)))
        yield


class _Fused(TorchDispatchMode):
    """Skips torch's fused optimizers, which change their operands in place and return nothing.

    Otherwise fake tensors would run them on real zeros, and memory would not suffice for a wide network.
    """

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator.overloadpacket in FUSED_OPTIMIZERS:
            return None
        return operator(*args, **(kwargs or {}))


@contextlib.contextmanager
def prepared(config: Config, ranks: int) -> Iterator[tuple[training.Trainer, list[Batch]]]:
    """Rank 0's trainer in a process group of so many ranks that send nothing, and the batches of a step."""
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    with mock.patch.dict(os.environ, variables):
        init_fake_process_group(ranks)
        try:
            trainer = build_trainer(config, World(0, ranks, 0, ranks, torch.device("cpu"), "gloo"))
            yield trainer, [batch(config, ranks) for _ in range(config.engine.accumulation_steps)]
        finally:
            process_group.stop()  # DeepSpeed's, too


def build_trainer(config: Config, world: World) -> training.Trainer:
    """A trainer without images."""

    def make_target(online: nn.Module) -> nn.Module:  # a fake tensor cannot be copied deeply
        target = build_encoder(config.model, config.seed, world.device)
        return target.requires_grad_(False).train()

    def build_fragments(engine, optimizer: Gated) -> Fragments:  # their self-check reads values
        return (PartitionedFragments if engine.zero_optimization_stage() else WholeFragments)(engine, optimizer)

    def to(module: nn.Module, *_: object, memory_format: torch.memory_format | None = None) -> nn.Module:
        if memory_format is not None:  # torch's own cannot exchange fake parameters
            for parameter in module.parameters():
                if parameter.ndim == 4:
                    parameter.data = parameter.data.contiguous(memory_format=memory_format)
        return module

    loader = types.SimpleNamespace(steps_per_epoch=1000 * config.engine.accumulation_steps)
    with (
        mock.patch.object(training, "BadImages"),
        mock.patch.object(training, "identity"),
        mock.patch.object(training, "build_loader", return_value=loader),
        mock.patch.object(branches, "make_target", make_target),
        mock.patch.object(process_group, "limit"),  # no other rank to wait for
        mock.patch.object(training, "build_fragments", build_fragments),
        mock.patch.object(nn.Module, "to", to),
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
