"""Walks a training step on fake tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from torch import Tensor

from unigrad_fast.config import Config
from unigrad_fast.dry_run.cards import Card
from unigrad_fast.dry_run.counting import Count
from unigrad_fast.dry_run.walked import Walk
from unigrad_fast.dry_run.without_data import prepared
from unigrad_fast.kernels.dispatch import as_on_cuda
from unigrad_fast.networks import batch_norm
from unigrad_fast.runtime.errors import UserError
from unigrad_fast.runtime.torch_private import (
    FUSED_OPTIMIZERS,
    DataDependentOutputException,
    FakeTensorMode,
    TorchDispatchMode,
)


def require_walkable(config: Config, ranks: int) -> None:
    """Raises UserError if the batch does not divide over the ranks, or for a setting that cannot be walked."""
    if config.engine.target_stream:
        raise UserError("engine.target_stream = true: the dry run does not model overlap; leave it out")
    if config.engine.cuda_graph:
        raise UserError("engine.cuda_graph = true: the dry run walks the step without a graph; leave it out")
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
    if as_cuda and config.engine.precision == "auto":  # every card has bf16, whatever this machine's CPU has
        config = config.model_copy(update={"engine": config.engine.model_copy(update={"precision": "bf16"})})
    found = Walk()
    device = as_on_cuda() if as_cuda else mock.patch.object(batch_norm, "host_may_read", lambda tensor: False)
    fake = FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)
    with device, fake, _Fused(), prepared(config, ranks) as (trainer, batches):
        try:
            with _spies(found):
                trainer.step(0, iter(batches))
                found.waits.clear()
                with Count(found, trainer, card, ranks):
                    trainer.step(1, iter(batches))
        except DataDependentOutputException as error:
            raise RuntimeError(f"the step reads a value ({error.func}), for which the host waits") from error
    return found


@contextlib.contextmanager
def _spies(found: Walk) -> Iterator[None]:
    """Records calls that wait for the device without reading a value."""

    def spy(name: str) -> Callable[..., None]:
        def call(*_: object, **__: object) -> None:
            found.waits.append(name)

        return call

    with contextlib.ExitStack() as stack:
        for owner, name, shown in (
            (torch.cuda, "synchronize", "torch.cuda.synchronize"),
            (torch.cuda.Event, "synchronize", "Event.synchronize"),
            (torch.cuda.Stream, "synchronize", "Stream.synchronize"),
            (Tensor, "cpu", "Tensor.cpu"),
            (Tensor, "numpy", "Tensor.numpy"),
        ):
            stack.enter_context(mock.patch.object(owner, name, spy(shown)))
        yield


class _Fused(TorchDispatchMode):
    """Skips torch's fused optimizers, which change their operands in place and return nothing.

    Otherwise fake tensors would run them on real zeros, and memory would not suffice for a wide network.
    """

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator.overloadpacket in FUSED_OPTIMIZERS:
            return None
        return operator(*args, **(kwargs or {}))
