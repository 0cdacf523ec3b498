"""LARS: momentum with a learning rate per layer, for tensors that are whole or split over ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from unigrad_fast.kernels import ops
from unigrad_fast.kernels.dispatch import use_triton
from unigrad_fast.optimization.gated import Gated, Stretch
from unigrad_fast.runtime.torch_private import (
    foreach_add,
    foreach_add_,
    foreach_addcmul_,
    foreach_mul,
    foreach_mul_,
    foreach_norm,
)

Rows: TypeAlias = "list[tuple[Tensor, Tensor, Tensor]]"  # weights, gradients, velocities


class LARS(Gated):
    """Momentum with a learning rate per layer (You, Gitman and Ginsburg, 2017), clipped and gated on the device.

    v ← momentum·v + t·(grad + weight_decay·w),  w ← w − lr·v,  t = trust_coefficient·‖w‖ / ‖grad + weight_decay·w‖,
    with t = 1 where either norm is 0 and in groups with `adapt=False`. If a gradient contains a NaN or an infinity, or
    `nonfinite` was set before, neither w nor v changes. The host does not wait.

    Under ZeRO, after `divide` was called, a tensor's norms need all ranks that hold a part of it: one all-reduce sums
    ‖w‖², ‖grad‖² and ⟨w, grad⟩ of all tensors, which also covers clipping.

    Args:
        params: parameters or groups of them, fp32 or float64.
        lr: learning rate; if it is a scalar on the parameters' device, it is read there.
        momentum: at least 0, below 1.
        weight_decay: L2 penalty.
        trust_coefficient: ratio of an update's norm to its parameter's, at lr 1.
        clip_norm: largest ℓ2 norm of the whole gradient, larger ones are scaled down to it; 0 is no clipping.
    """

    def __init__(
        self,
        params: Iterable,
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
        clip_norm: float = 0.0,
    ):
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
            "adapt": True,
        }
        super().__init__(params, defaults)
        self._begin(clip_norm)
        self._stretches: Sequence[Stretch] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_stretches": None}  # the flat parameters would be copied

    def divide(self, stretches: Sequence[Stretch], tensors: int) -> None:
        flats = [flat for group in self.param_groups if group["adapt"] for flat in group["params"]]
        adapted = [n for n, s in enumerate(stretches) if any(s.flat is flat for flat in flats)]
        self._stretches, self._tensors, self._adapted = stretches, tensors, adapted
        self._numbers = torch.tensor([s.number for s in stretches], dtype=torch.int64, device=self.nonfinite.device)
        self._adapted_numbers = self._numbers[adapted]

    @torch.no_grad()
    def measure(self, gradients: list[Tensor], sharded: bool = False) -> None:
        if self._stretches is None:
            super().measure(gradients, sharded)
            return
        # ‖w‖², ‖grad‖² and ⟨w, grad⟩ of each tensor; the norms after clipping and decay follow from them.
        sums = torch.zeros(3, self._tensors, dtype=torch.float64, device=self.nonfinite.device)
        if gradients:
            sums[1].index_copy_(0, self._numbers, torch.stack(foreach_norm(gradients)).double().square())
        if self._adapted:
            weights = [self._stretches[n].of(self._stretches[n].flat) for n in self._adapted]
            products = [torch.dot(w, gradients[n]) for w, n in zip(weights, self._adapted, strict=True)]
            sums[0].index_copy_(0, self._adapted_numbers, torch.stack(foreach_norm(weights)).double().square())
            sums[2].index_copy_(0, self._adapted_numbers, torch.stack(products).double())
        dist.all_reduce(sums)
        self._sums = sums
        self._take(sums[1].sum().sqrt().float())

    def move(self) -> None:
        scale = None
        if self.clip_norm > 0:
            scale = (self.clip_norm / self.gradient_norm).clamp_(max=1.0).float()
        if self.loss_scale is not None:
            scale = (1.0 if scale is None else scale) / self.loss_scale.value
        for group in self.param_groups:
            lr = group["lr"]
            if not isinstance(lr, Tensor):
                lr = torch.full_like(self.nonfinite, lr, dtype=torch.float64)
            rows = [(w, w.grad, self.state_of(w)["momentum"]) for w in group["params"] if w.grad is not None]
            is_cut = group["adapt"] and self._stretches is not None
            if rows and not is_cut and use_triton(self.nonfinite.device):
                from unigrad_fast.kernels import multi_tensor

                fused, rows = multi_tensor.split(rows)
                if fused:
                    names = ("momentum", "weight_decay", "trust_coefficient", "adapt")
                    settings = {name: group[name] for name in names}
                    weights, gradients, velocities = zip(*fused, strict=True)
                    ops.lars_(weights, gradients, velocities, lr, **settings, skip=self.nonfinite, scale=scale)
            if rows:
                self._move(rows, lr, group, scale)

    def _move(self, rows: Rows, lr: Tensor, group: dict[str, Any], scale: Tensor | None) -> None:
        """One step in PyTorch, without the fused kernel."""
        weights, updates, velocities = (list(tensors) for tensors in zip(*rows, strict=True))
        dropped = self.nonfinite != 0
        if scale is not None:
            updates = list(foreach_mul(updates, scale))
        if group["weight_decay"]:
            updates = list(foreach_add(updates, weights, alpha=group["weight_decay"]))
        updates = [torch.where(dropped, 0.0, update) for update in updates]
        if group["adapt"] and self._stretches is None:
            weight_norms, update_norms = (torch.stack(foreach_norm(each)) for each in (weights, updates))
            ratios = trust_ratios(weight_norms, update_norms, group["trust_coefficient"])
            foreach_mul_(updates, list(ratios))
        elif group["adapt"]:
            self._adapt_stretches_(weights, updates, group, scale)
        kept = (~dropped).double()
        foreach_mul_(velocities, kept * group["momentum"] + (1 - kept))
        foreach_add_(velocities, updates)
        foreach_addcmul_(weights, velocities, [kept * lr] * len(weights), value=-1)

    def _adapt_stretches_(
        self, flats: list[Tensor], updates: list[Tensor], group: dict[str, Any], scale: Tensor | None
    ) -> None:
        """Multiply the updates of flat parameters, tensor by tensor, by trust ratios from the sums of `measure`."""
        weight_squares, squares, products = self._sums
        if scale is not None:
            squares, products = squares * scale.double().square(), products * scale
        decay = group["weight_decay"]
        update_squares = (squares + 2 * decay * products + decay**2 * weight_squares).clamp(min=0)
        ratios = trust_ratios(weight_squares.sqrt(), update_squares.sqrt(), group["trust_coefficient"])
        for flat, update in zip(flats, updates, strict=True):
            here = [stretch for stretch in self._stretches or () if stretch.flat is flat]
            if here:
                every = list(ratios.to(update.dtype))
                foreach_mul_([s.of(update) for s in here], [every[s.number] for s in here])


def trust_ratios(weight_norms: Tensor, update_norms: Tensor, trust_coefficient: float) -> Tensor:
    ratios = trust_coefficient * weight_norms / update_norms
    return torch.where((weight_norms > 0) & (update_norms > 0), ratios, 1.0)
