"""Stochastic gradient descent that drops a step on the device when its gradients are not finite."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from unigrad_fast.optimization.gated import GatedFused


class SGD(GatedFused, torch.optim.SGD):
    """Stochastic gradient descent with momentum, clipped and gated on the device.

    v ← momentum·v + grad + weight_decay·w,  w ← w − lr·v, in one fused pass over parameters that share a dtype and
    a device. If a gradient contains a NaN or an infinity, or `nonfinite` was set before, neither w nor v changes; the
    host does not wait to find out.

    Args:
        params: parameters or groups of them.
        lr: learning rate.
        momentum: at least 0, below 1.
        weight_decay: L2 penalty.
        clip_norm: largest ℓ2 norm of the whole gradient, larger ones are scaled down to it; 0 is no clipping.
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
        self._begin(clip_norm)
