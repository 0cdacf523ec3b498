"""Base of all optimizers: clipping, the loss scale, and dropping a step on the device if gradients are not finite."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from unigrad_fast.optimization.loss_scale import LossScale


@dataclass(frozen=True)
class Stretch:
    """Elements [place, place + numel) of a flat parameter, which belong to the network's tensor `number`."""

    flat: Tensor
    place: int
    numel: int
    number: int

    def of(self, tensor: Tensor) -> Tensor:
        """The same elements of a tensor with the flat parameter's layout."""
        return tensor[self.place : self.place + self.numel]


class Gated(torch.optim.Optimizer):
    """An optimizer whose step clips gradients and may be dropped, without the host waiting to find out.

    If a gradient contains a NaN or an infinity, or `nonfinite` was set before, a step changes nothing. Subclasses
    implement the step in `move`, and override `state_of` if their state per parameter is more than a momentum.

    Attributes:
        kinds: names of the state tensors of every parameter, as in a checkpoint.
        copies: how many of them are as large as the parameter.
        clip_norm: largest ℓ2 norm of the whole gradient; larger ones are scaled down to it; 0 means no clipping.
        nonfinite: float32 scalar on the parameters' device. Code that finds a non-finite value before the step sets it
            to 1; `measure` does so for gradients; `open` clears it.
        gradient_norm: ℓ2 norm of the whole gradient at the last step, before clipping; a scalar on the device.
        loss_scale: what the loss was multiplied by before backward, so that the gradients must be divided by it; None
            is no scale.
    """

    kinds: ClassVar[tuple[str, ...]] = ("momentum",)
    copies: ClassVar[int] = 1

    def _begin(self, clip_norm: float) -> None:
        device = self.param_groups[0]["params"][0].device
        self.clip_norm = clip_norm
        self.nonfinite = torch.zeros((), dtype=torch.float32, device=device)
        self.gradient_norm = torch.zeros((), dtype=torch.float32, device=device)
        self._measured = False
        self._is_old = False  # the flag belongs to an earlier step
        self.loss_scale: LossScale | None = None

    def __getstate__(self) -> dict[str, Any]:
        own = ("clip_norm", "nonfinite", "gradient_norm", "_measured", "_is_old", "loss_scale")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in own}}

    @property
    def rate_dtype(self) -> torch.dtype:
        """Dtype of a group's `lr` if it is a scalar on the parameters' device, which may change between steps."""
        return torch.float64

    @torch.no_grad()
    def state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        """The state of a parameter, by kind; initialised if there was no step yet."""
        # SGD's fused kernel would leave the momentum unset if it skipped the first step; starting from zero gives the
        # same first step. It walks memory in order, so the momentum gets the layout that its parameter has by now.
        if not self.state[parameter]:
            self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        return {"momentum": self.state[parameter]["momentum_buffer"]}

    def divide(self, stretches: Sequence[Stretch], tensors: int) -> None:
        """Call under ZeRO before the first step: says which of the network's tensors this rank's flat parameters hold.

        Args:
            stretches: in the order in which `measure` receives their gradients.
            tensors: number of the network's tensors, the same on all ranks.
        """

    def open(self) -> None:
        """Call at the start of a step, before anything that may set `nonfinite`."""
        self.nonfinite.zero_()
        self._measured = self._is_old = False

    @torch.no_grad()
    def measure(self, gradients: list[Tensor], sharded: bool = False) -> None:
        """Compute the norm of the whole gradient, and check that it is finite.

        `step` calls this unless it was called since `open`. Under ZeRO call it before: DeepSpeed steps one parameter
        group after the other, and the first step must already know about all gradients.

        Args:
            gradients: this rank's gradients.
            sharded: each rank has a part of the gradient; otherwise all have all of it.
        """
        norm = torch.nn.utils.get_total_norm(gradients, foreach=True).to(self.nonfinite.device)
        if sharded:
            square = norm.double().square()
            dist.all_reduce(square)
            norm = square.sqrt().float()
        self._take(norm)

    def _take(self, norm: Tensor) -> None:
        overflowed = (~torch.isfinite(norm)).float()
        if self.loss_scale is not None:
            self.loss_scale.note(self.nonfinite, overflowed)
            norm = norm / self.loss_scale.value
        self.gradient_norm = norm
        torch.maximum(self.nonfinite, overflowed, out=self.nonfinite)
        self._measured = True

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        for parameter in parameters:
            self.state_of(parameter)
        measured_before = self._measured
        if not measured_before:
            if self._is_old:
                self.nonfinite.zero_()
            self.measure([p.grad for p in parameters])
        self.move()
        self._measured, self._is_old = measured_before, not measured_before
        return loss

    def move(self) -> None:
        """Update the parameters and their state, or nothing if `nonfinite` is not 0."""
        raise NotImplementedError


class GatedFused(Gated):
    """Base of torch's optimizers whose fused kernels can drop a step and divide gradients themselves."""

    @property
    def rate_dtype(self) -> torch.dtype:
        return torch.float32 if self.nonfinite.is_cuda else torch.float64  # torch's GPU kernels take no other

    def move(self) -> None:
        self.found_inf = self.nonfinite
        # The kernel divides gradients by `grad_scale`.
        if self.clip_norm > 0:
            self.grad_scale = (self.gradient_norm / self.clip_norm).clamp_(min=1.0).float()
            if self.loss_scale is not None:
                self.grad_scale *= self.loss_scale.value
        elif self.loss_scale is not None:
            self.grad_scale = self.loss_scale.value
        super(Gated, self).step()
