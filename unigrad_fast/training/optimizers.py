"""Optimizers that drop a step on the device when its gradients are not finite."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from unigrad_fast import config


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
            it to 1; `step` raises it for gradients; the caller clears it with `zero_` before the next step.
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
        self.nonfinite = torch.zeros((), device=device)
        self.gradient_norm = torch.zeros((), device=device)

    @torch.no_grad()
    def step(self, closure=None) -> None:
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        # The fused kernel would leave the momentum unset when it skips the first step; from zero the first step is
        # the same. It walks memory in order, so the momentum takes the layout that its parameter has by now.
        for p in parameters:
            if not self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        self.gradient_norm = torch.nn.utils.get_total_norm([p.grad for p in parameters], foreach=True)
        torch.maximum(self.nonfinite, (~torch.isfinite(self.gradient_norm)).float(), out=self.nonfinite)
        self.found_inf = self.nonfinite
        if self.clip_norm > 0:
            self.grad_scale = (self.gradient_norm / self.clip_norm).clamp_(min=1.0).float()  # gradients are divided
        super().step(closure)


def parameter_groups(module: nn.Module, settings: config.Optimizer) -> list[dict]:
    """Parameters with their weight decay; with `exclude_bias_and_norm`, one-dimensional ones have none."""
    if not settings.exclude_bias_and_norm:
        return [{"params": list(module.parameters()), "weight_decay": settings.weight_decay}]
    matrices = [p for p in module.parameters() if p.ndim > 1]
    vectors = [p for p in module.parameters() if p.ndim <= 1]
    return [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]


def build_optimizer(module: nn.Module, settings: config.Optimizer) -> SGD:
    """The optimizer of a configuration; the schedule sets its learning rate before each step."""
    groups = parameter_groups(module, settings)
    return SGD(groups, lr=settings.base_lr, momentum=settings.momentum, clip_norm=settings.clip_norm)
