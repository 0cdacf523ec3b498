"""Two forward passes in lockstep, so that one gather brings the statistics of both passes' norms.

A network whose forward pass can pause has a method `steps`, a generator that yields each norm with its input just
before it calls the norm, and returns the network's output. In lockstep this replaces the module's call, so that of the
hooks only those of modules without `steps` run, such as convolutions, linear layers and norms.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from unigrad_fast.networks import batch_norm

Steps: TypeAlias = "Generator[tuple[batch_norm.GroupedBatchNorm, Tensor], None, Any]"


_in_lockstep = False


def steps_of(module: nn.Module, x: Any) -> Steps:
    """The forward pass of a module; it pauses in lockstep, if the module has `steps`."""
    if not (_in_lockstep and hasattr(module, "steps")):
        return module(x)
    return (yield from module.steps(x))


def alone(steps: Steps) -> Any:
    """The output of a pass whose norms each gather for themselves."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def together(target: Steps, online: Steps) -> tuple[Any, Any]:
    """The outputs of two passes, the first without gradient; their n-th norms share a gather.

    Where one pass has more norms than the other, the rest gather for themselves. Statistics, running buffers and
    outputs are those of two passes one after the other, bit for bit.
    """
    passes, outputs = {"target": (target, False), "online": (online, True)}, {}
    with _paused_in_all():
        while passes:
            waiting = []
            for name, (steps, with_gradient) in list(passes.items()):
                try:
                    with torch.set_grad_enabled(with_gradient):
                        waiting.append(next(steps))
                except StopIteration as end:
                    outputs[name] = end.value
                    del passes[name]
            if len(waiting) > 1:
                _gather(waiting)
    return outputs["target"], outputs["online"]


@contextmanager
def _paused_in_all() -> Iterator[None]:
    global _in_lockstep
    _in_lockstep = True
    try:
        yield
    finally:
        _in_lockstep = False


@torch.no_grad()
def _gather(waiting: Sequence[tuple[batch_norm.GroupedBatchNorm, Tensor]]) -> None:
    """Gather what norms need of all ranks to compute the statistics of their inputs."""
    own_GS = [norm.own_statistics(x) for norm, x in waiting]
    parts_R1N = batch_norm.gathered(torch.cat([each.view(1, -1) for each in own_GS], dim=1))
    ranks, _, numbers = parts_R1N.shape
    start = 0
    for (norm, _), own in zip(waiting, own_GS, strict=True):
        groups, each = own.shape
        norm.groups.gathered[norm] = parts_R1N.as_strided((ranks, groups, each), (numbers, each, 1), start)
        start += groups * each
