"""The walk itself."""

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
    """Raises UserError where the batch does not divide over the ranks, or for a setting that is not walked."""
    if config.engine.target_stream:
        raise UserError("engine.target_stream = true: the dry run lets nothing overlap; leave it out")
    if config.engine.cuda_graph:
        raise UserError("engine.cuda_graph = true: the dry run walks the step that is recorded; leave it out")
    if config.engine.compile:
        raise UserError("engine.compile = true: the dry run walks the step as it is written; leave it out")
    if config.objective.takes("eigen_every"):
        raise UserError(
            f"objective.method = {config.objective.method}: the host waits for its eigenvectors, which the dry run "
            "cannot walk; use another method"
        )
    config.check_world(ranks)


def walk(config: Config, ranks: int, card: Card, as_cuda: bool = True) -> Walk:
    """The second step of a run on so many cards, as rank 0 sees it; in the first, memory is made that stays.

    Args:
        as_cuda: take the branches of a GPU, else those of the CPU, which compute the same in plain torch.

    Raises:
        UserError: see `require_walkable`.
        RuntimeError: the step reads a value; or there is a process group already.
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
    """Notes calls that wait for the device without reading a value."""

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
    """Torch's fused optimizers, which change their operands and return nothing.

    Without it fake tensors would have them computed on zeros, for which the memory of a wide network is not there.
    """

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator.overloadpacket in FUSED_OPTIMIZERS:
            return None
        return operator(*args, **(kwargs or {}))
