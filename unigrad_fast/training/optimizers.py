"""Optimizers that drop a step on the device when its gradients are not finite."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unigrad_fast import config
from unigrad_fast.kernels.ops import use_triton


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
        self.nonfinite = torch.zeros((), device=device)
        self.gradient_norm = torch.zeros((), device=device)
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
    def step(self, closure=None) -> None:
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
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    velocities: Sequence[Tensor],
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
