"""ZeRO stages 0 to 2 by whole tensors: each parameter has an owner, the rank that keeps its momentum and updates it.

    stage 0   every rank updates all parameters
    stage 1   owners alone have momentum; the gradients of a step are summed at its end, at their owners
    stage 2   each gradient is summed at its owner as soon as backward has computed it, and the others drop it

A tensor is never cut, so LARS's norms and the sums over elements are the same at each stage, and so are the bits of a
step with one micro-batch on one or two ranks. A rank's share exceeds the mean by less than the largest tensor. Weights
are whole on every rank. DeepSpeed, which drives pretraining, cuts tensors: shares are equal, but a rank has its own of
the weights twice.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from unigrad_fast.optimization.gated import Gated


class Owners:
    """The owners of an optimizer's parameters, and their gradients; all ranks of the default group use it together.

    Args:
        parameters: dense in memory, in final memory format, the same on all ranks; each gets a gradient in backward.
        stage: 0, 1 or 2.
    """

    def __init__(self, parameters: Sequence[Tensor], stage: int) -> None:
        self.parameters = parameters
        self._flat = flat_gradient(parameters) if stage == 0 else None
        self._early = stage == 2
        numbers = divided([parameter.numel() for parameter in parameters], dist.get_world_size())
        self._rank_of = dict(zip(parameters, numbers, strict=True))
        for parameter in parameters if self._early else ():
            parameter.register_post_accumulate_grad_hook(self._to_owner)

    def has(self, parameter: Tensor) -> bool:
        """Whether this rank updates a parameter."""
        return self._flat is not None or self._rank_of[parameter] == dist.get_rank()

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Call after a step's last backward pass: sums gradients over all ranks, updates all weights, clears gradients.

        A gradient that is not finite on any rank stops the step of all owners, if the optimizer is `Gated`.
        """
        if self._flat is not None:
            dist.all_reduce(self._flat)
        elif not self._early:
            for parameter in self.parameters:
                self._to_owner(parameter)
        if isinstance(optimizer, Gated):
            optimizer.open()
            gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
            optimizer.measure(gradients, sharded=self._flat is None)
        optimizer.step()
        if self._flat is not None:
            self._flat.zero_()
            return
        for parameter in self.parameters:
            parameter.grad = None
            self.send(parameter, parameter)

    def send(self, tensor: Tensor, parameter: Tensor) -> None:
        """Copy a tensor, like a parameter in shape and memory format, from the parameter's owner to all ranks."""
        if self._flat is None:
            dist.broadcast(_in_memory(tensor), self._rank_of[parameter])

    def _to_owner(self, parameter: Tensor) -> None:
        """The owner's gradient holds the sum of earlier micro-batches, the others' only what was added since."""
        assert parameter.grad is not None
        dist.reduce(_in_memory(parameter.grad), self._rank_of[parameter])
        if not self.has(parameter):
            parameter.grad = None


def divided(sizes: Sequence[int], ranks: int) -> list[int]:
    """A rank for each size, the largest first and each to the rank that has least."""
    loads, chosen = [0] * ranks, [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda each: -sizes[each]):
        chosen[number] = loads.index(min(loads))
        loads[chosen[number]] += sizes[number]
    return chosen


def flat_gradient(parameters: Sequence[Tensor]) -> Tensor:
    """A vector of zeros; the gradient of each parameter becomes a part of it, in the parameter's memory format.

    Fused optimizers walk through both in the order of memory.
    """
    flat = torch.cat([torch.zeros_like(p).flatten() for p in parameters])
    for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = part.as_strided(parameter.shape, parameter.stride())
    return flat


def _in_memory(tensor: Tensor) -> Tensor:
    """The elements of a dense tensor in the order of memory, whatever its format."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))
