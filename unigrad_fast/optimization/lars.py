"""LARS: momentum with a learning rate per layer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import torch
from torch import Tensor

from unigrad_fast.kernels.dispatch import use_triton

Tensors: TypeAlias = "list[Tensor] | tuple[Tensor, ...]"


class LARS(torch.optim.Optimizer):
    """Momentum with a learning rate per layer (You, Gitman and Ginsburg, 2017).

    v ← momentum·v + t·(grad + weight_decay·w),  w ← w − lr·v,  t = trust_coefficient·‖w‖ / ‖grad + weight_decay·w‖,
    with t = 1 where either norm is 0 and in groups with `adapt=False`. The host waits for nothing.

    Args:
        params: parameters or groups of them, fp32 or float64.
        lr: learning rate.
        momentum: 0 to below 1.
        weight_decay: L2 penalty.
        trust_coefficient: ratio of an update's norm to its parameter's, at lr 1.
    """

    def __init__(
        self,
        params: Iterable,
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
    ):
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
            "adapt": True,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            weights = [p for p in group["params"] if p.grad is not None]
            for weight in weights:
                if not self.state[weight]:
                    self.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
            tensors = [(w, w.grad, self.state[w]["momentum_buffer"]) for w in weights]
            names = ("lr", "momentum", "weight_decay", "trust_coefficient", "adapt")
            settings = {name: group[name] for name in names}
            if weights and use_triton(weights[0].device):
                from unigrad_fast.kernels import multi_tensor

                fused, tensors = multi_tensor.split(tensors)
                if fused:
                    multi_tensor.lars_(*zip(*fused, strict=True), **settings)
            if tensors:
                lars_(*zip(*tensors, strict=True), **settings)
        return loss


def lars_(
    weights: Tensors,
    gradients: Tensors,
    velocities: Tensors,
    *,
    lr: float,
    momentum: float,
    weight_decay: float,
    trust_coefficient: float,
    adapt: bool,
) -> None:
    """One step of LARS in plain torch: weights and velocities change in place. All are on one device."""
    updates = torch._foreach_add(gradients, weights, alpha=weight_decay) if weight_decay else gradients
    torch._foreach_mul_(velocities, momentum)
    if adapt:
        weight_norms, update_norms = (torch.stack(torch._foreach_norm(tensors)) for tensors in (weights, updates))
        ratios = trust_coefficient * weight_norms / update_norms
        ratios = torch.where((weight_norms > 0) & (update_norms > 0), ratios, 1.0)
        torch._foreach_addcmul_(velocities, updates, ratios.unbind())
    else:
        torch._foreach_add_(velocities, updates)
    torch._foreach_add_(weights, velocities, alpha=-lr)
