"""The target branch: a momentum copy of the online encoder that receives no gradient.

Its weights are fp32; under autocast, layers multiply with copies in a lower precision. Code that updates the weights
updates the copies too, so that no forward pass has to cast them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from unigrad_fast.kernels import ops
from unigrad_fast.kernels.dispatch import use_triton
from unigrad_fast.runtime.torch_private import foreach_copy_, foreach_lerp_


def make_target(online: nn.Module) -> nn.Module:
    """A copy of the online encoder, in training mode with its own batch-norm buffers, without gradients."""
    target = copy.deepcopy(online)
    target.requires_grad_(False)
    return target.train()


def make_copies(target: nn.Module, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Copies, by name, of the weights that autocast would cast in each pass: those of convolutions and linear layers.

    Args:
        dtype: autocast's dtype; None is fp32, which needs no copies.
    """
    cast = [name for name, module in target.named_modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    copies = {
        name: torch.empty_like(parameter, dtype=dtype)
        for name, parameter in target.named_parameters()
        if dtype is not None and name.rpartition(".")[0] in cast
    }
    refresh_(copies, target)
    return copies


@torch.no_grad()
def refresh_(copies: Mapping[str, Tensor], target: nn.Module) -> None:
    """Update the copies after code other than `update_target_` has written the target's weights."""
    for name, low in copies.items():
        low.copy_(target.get_parameter(name))


def embed(target: nn.Module, copies: Mapping[str, Tensor], views: Sequence[Tensor], *run: Callable) -> Any:
    """The target's embeddings of views, computed with the copies as weights; under autocast in their dtype.

    Args:
        run: at most one; see `Encoder.forward`.
    """
    return functional_call(target, dict(copies), (views, *run), tie_weights=False)


@torch.no_grad()
def update_target_(
    target: nn.Module,
    online: nn.Module,
    momentum: float | Tensor,
    skip: Tensor,
    copies: Mapping[str, Tensor] | None = None,
) -> None:
    """target ← momentum · target + (1 − momentum) · online, in place; unchanged where `skip` is not 0.

    Args:
        momentum: m(s+1) after step s; a number, or a float64 scalar on the parameters' device.
        skip: a scalar on the parameters' device.
        copies: result of `make_copies`, updated as well.
    """
    if not isinstance(momentum, Tensor):
        momentum = torch.full_like(skip, momentum, dtype=torch.float64)
    parameters = list(zip(target.parameters(), online.parameters(), strict=True))
    copy_of = {target.get_parameter(name): low for name, low in (copies or {}).items()}
    if use_triton(skip.device):
        from unigrad_fast.kernels import multi_tensor

        fused, parameters = multi_tensor.split(sorted(parameters, key=lambda pair: pair[0] not in copy_of))
        if fused:
            targets, onlines = zip(*fused, strict=True)
            written = [copy_of.pop(ours) for ours in targets if ours in copy_of]
            ops.lerp_(targets, onlines, written, momentum, skip)
    if parameters:
        ours, theirs = zip(*parameters, strict=True)
        weight = torch.where(skip != 0, 0.0, 1.0 - momentum).to(ours[0].dtype)
        foreach_lerp_(ours, theirs, [weight] * len(ours))
    if copy_of:
        foreach_copy_(list(copy_of.values()), list(copy_of))
