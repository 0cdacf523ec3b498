"""The target branch: a momentum copy of the online encoder that receives no gradient."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from unigrad_fast.kernels.dispatch import use_triton
from unigrad_fast.kernels.ops import OPERATORS


def make_target(online: nn.Module) -> nn.Module:
    """A copy of the online encoder, in training mode with its own batch-norm buffers, without gradients."""
    target = copy.deepcopy(online)
    target.requires_grad_(False)
    return target.train()


@torch.no_grad()
def update_target_(target: nn.Module, online: nn.Module, momentum: float, skip: Tensor) -> None:
    """target ← momentum · target + (1 − momentum) · online, in place; unchanged where `skip` is not 0.

    Args:
        momentum: m(s+1) after step s.
        skip: scalar on the parameters' device.
    """
    parameters = list(zip(target.parameters(), online.parameters(), strict=True))
    if use_triton(skip.device):
        from unigrad_fast.kernels import multi_tensor

        fused, parameters = multi_tensor.split(parameters)
        if fused:
            targets, onlines = zip(*fused, strict=True)
            OPERATORS.lerp_(targets, onlines, 1.0 - momentum, skip)
    if parameters:
        ours, theirs = zip(*parameters, strict=True)
        weight = torch.full_like(skip, 1.0 - momentum, dtype=ours[0].dtype)
        weight = torch.where(skip != 0, 0.0, weight)
        torch._foreach_lerp_(ours, theirs, [weight] * len(ours))
