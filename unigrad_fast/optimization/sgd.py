"""Stochastic gradient descent that drops a step on the device when its gradients are not finite."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor


class SGD(torch.optim.SGD):
    """Stochastic gradient descent with momentum, clipped and gated on the device.

    v ← momentum·v + grad + weight_decay·w,  w ← w − lr·v, in one fused pass over parameters that share a dtype and
    a device. When a gradient holds a NaN or an infinity, or `nonfinite` was set before, neither w nor v changes; the
    host does not wait to find out.

    Args:
        params: parameters or groups of them.
        lr: learning rate.
        momentum: 0 to below 1.
        weight_decay: L2 penalty.
        clip_norm: largest ℓ2 norm of the whole gradient, larger ones are scaled down to it; 0 is no clipping.

    Attributes:
        nonfinite: float32 scalar on the parameters' device. Whoever meets a non-finite value before the step raises
            it to 1; `measure` raises it for gradients; `open` clears it.
        gradient_norm: ℓ2 norm of the whole gradient at the last step, before clipping; a scalar on the device.
    """

    def __init__(
        self,
        params: Iterable,
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        clip_norm: float = 0.0,
    ):
        super().__init__(params, lr=lr, momentum=momentum, weight_decay=weight_decay, fused=True)
        device = self.param_groups[0]["params"][0].device
        self.clip_norm = clip_norm
        self.nonfinite = torch.zeros((), dtype=torch.float32, device=device)
        self.gradient_norm = torch.zeros((), dtype=torch.float32, device=device)
        self._measured = False

    def open(self) -> None:
        """Before whatever may meet non-finite values in this step."""
        self.nonfinite.zero_()
        self._measured = False

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
        self.gradient_norm = norm
        torch.maximum(self.nonfinite, (~torch.isfinite(norm)).float(), out=self.nonfinite)
        self._measured = True

    @torch.no_grad()
    def momentum_of(self, parameter: Tensor) -> Tensor:
        """The velocity v of a parameter, in its layout; zeros before the first step."""
        # The fused kernel would leave the momentum unset when it skips the first step; from zero the first step is
        # the same. It walks memory in order, so the momentum takes the layout that its parameter has by now.
        if not self.state[parameter]:
            self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        return self.state[parameter]["momentum_buffer"]

    @torch.no_grad()
    def step(self, closure=None):
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        for parameter in parameters:
            self.momentum_of(parameter)
        measured_before = self._measured
        if not measured_before:
            self.measure([p.grad for p in parameters])
        self.found_inf = self.nonfinite
        if self.clip_norm > 0:
            self.grad_scale = (self.gradient_norm / self.clip_norm).clamp_(min=1.0).float()  # gradients are divided
        super().step(closure)
        self._measured = measured_before
