"""The frame of all optimizers: clipping, and a step that is dropped on the device when its gradients are not finite."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Stretch:
    """Elements [place, place + numel) of a flat parameter, which are elements of the network's tensor `number`."""

    flat: Tensor
    place: int
    numel: int
    number: int

    def of(self, tensor: Tensor) -> Tensor:
        """The same elements of a tensor that is laid out like the flat parameter."""
        return tensor[self.place : self.place + self.numel]


class Gated(torch.optim.Optimizer):
    """An optimizer whose step clips and may be dropped, without the host's waiting to find out.

    When a gradient holds a NaN or an infinity, or `nonfinite` was set before, a step changes nothing. Subclasses say
    in `move` what a step does, and in `state_of` what they keep for a parameter, unless that is its momentum alone.

    Attributes:
        kinds: names of what is kept for every parameter, as a checkpoint has them.
        copies: how many of them are as large as the parameter.
        clip_norm: largest ℓ2 norm of the whole gradient, larger ones are scaled down to it; 0 is no clipping.
        nonfinite: float32 scalar on the parameters' device. Whoever meets a non-finite value before the step raises
            it to 1; `measure` raises it for gradients; `open` clears it.
        gradient_norm: ℓ2 norm of the whole gradient at the last step, before clipping; a scalar on the device.
    """

    kinds: ClassVar[tuple[str, ...]] = ("momentum",)
    copies: ClassVar[int] = 1

    def _begin(self, clip_norm: float) -> None:
        device = self.param_groups[0]["params"][0].device
        self.clip_norm = clip_norm
        self.nonfinite = torch.zeros((), dtype=torch.float32, device=device)
        self.gradient_norm = torch.zeros((), dtype=torch.float32, device=device)
        self._measured = False
        self._is_old = False  # the flag is that of a step before

    def __getstate__(self) -> dict[str, Any]:
        own = ("clip_norm", "nonfinite", "gradient_norm", "_measured", "_is_old")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in own}}

    @property
    def rate_dtype(self) -> torch.dtype:
        """Of a group's `lr` that is a scalar on the parameters' device, where it may change between two steps."""
        return torch.float64

    @torch.no_grad()
    def state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        """What is kept for a parameter, by kind; as it is before the first step if there was none."""
        # SGD's fused kernel would leave the momentum unset when it skips the first step; from zero the first step is
        # the same. It walks memory in order, so the momentum takes the layout that its parameter has by now.
        if not self.state[parameter]:
            self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        return {"momentum": self.state[parameter]["momentum_buffer"]}

    def divide(self, stretches: Sequence[Stretch], tensors: int) -> None:
        """Under ZeRO, before the first step: what this rank's flat parameters hold of the network's tensors.

        Args:
            stretches: in the order in which `measure` is given their gradients.
            tensors: of the network, the same number on all ranks.
        """

    def open(self) -> None:
        """Before whatever may meet non-finite values in this step."""
        self.nonfinite.zero_()
        self._measured = self._is_old = False

    @torch.no_grad()
    def measure(self, gradients: list[Tensor], sharded: bool = False) -> None:
        """Take the norm of the whole gradient, and see whether it is finite.

        `step` does so itself unless it was done since `open`. Under ZeRO it has to be done before: there the steps of
        the parameter groups follow each other, and the first must know of all.

        Args:
            gradients: this rank's.
            sharded: each rank has a part of the gradient; else all have all of it.
        """
        norm = torch.nn.utils.get_total_norm(gradients, foreach=True).to(self.nonfinite.device)
        if sharded:
            square = norm.double().square()
            dist.all_reduce(square)
            norm = square.sqrt().float()
        self._take(norm)

    def _take(self, norm: Tensor) -> None:
        self.gradient_norm = norm
        torch.maximum(self.nonfinite, (~torch.isfinite(norm)).float(), out=self.nonfinite)
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
        """Change the parameters and what is kept for them, or nothing where `nonfinite` is not 0."""
        raise NotImplementedError


class GatedFused(Gated):
    """Of those optimizers of torch whose fused kernels drop a step and divide gradients themselves."""

    @property
    def rate_dtype(self) -> torch.dtype:
        return torch.float32 if self.nonfinite.is_cuda else torch.float64  # torch's kernels on a GPU take no other

    def move(self) -> None:
        self.found_inf = self.nonfinite
        if self.clip_norm > 0:
            self.grad_scale = (self.gradient_norm / self.clip_norm).clamp_(min=1.0).float()  # gradients are divided
        super(Gated, self).step()
