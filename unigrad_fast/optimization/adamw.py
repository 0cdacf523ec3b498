"""AdamW that drops a step on the device when its gradients are not finite."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from unigrad_fast.optimization.gated import GatedFused


class AdamW(GatedFused, torch.optim.AdamW):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019), clipped and gated on the device.

    A dropped step changes neither weights nor moments nor the step count.

    Args:
        params: parameters or groups of them.
        lr: learning rate.
        betas: decay rates of the running mean gradient and of the running mean square.
        weight_decay: share of a weight that is subtracted per step, at lr 1.
        clip_norm: largest ℓ2 norm of the whole gradient, larger ones are scaled down to it; 0 is no clipping.
    """

    kinds = ("exp_avg", "exp_avg_sq", "step")
    copies = 2

    def __init__(
        self,
        params: Iterable,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.01,
        clip_norm: float = 0.0,
    ):
        super().__init__(params, lr=lr, betas=betas, weight_decay=weight_decay, fused=True)
        self._begin(clip_norm)

    def move(self) -> None:
        # torch requires this while capturing and warns otherwise. Either way, steps are counted on the device.
        capturing = self.nonfinite.is_cuda and torch.cuda.is_current_stream_capturing()
        for group in self.param_groups:
            group["capturable"] = capturing
        super().move()

    @torch.no_grad()
    def state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        return {kind: state[kind] for kind in self.kinds}
