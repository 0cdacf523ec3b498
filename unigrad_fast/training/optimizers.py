"""The optimizer of a configuration: its parameter groups and its settings."""

from __future__ import annotations

from torch import nn

from unigrad_fast import config
from unigrad_fast.optimization.adamw import AdamW
from unigrad_fast.optimization.gated import Gated
from unigrad_fast.optimization.lars import LARS
from unigrad_fast.optimization.sgd import SGD

__all__ = ["LARS", "SGD", "AdamW", "build_optimizer", "parameter_groups"]


def parameter_groups(module: nn.Module, settings: config.Optimizer, constant: nn.Module | None = None) -> list[dict]:
    """Parameter groups with their weight decay and `lr_share`, their factor of the schedule's learning rate.

    One-dimensional parameters, biases and batch norm, get a separate group if they are treated differently: with
    `exclude_bias_and_norm` they have no decay and LARS does not adapt them; `bias_base_lr` is their learning rate.

    Args:
        constant: a part of the module whose learning rate stays at the peak; it gets groups marked `constant`.
    """
    if constant is not None:
        fixed = set(constant.parameters())
        groups = parameter_groups(module, settings)
        parts = [
            {**group, "params": [p for p in group["params"] if (p in fixed) == is_fixed], "constant": is_fixed}
            for is_fixed in (False, True)
            for group in groups
        ]
        return [part for part in parts if part["params"]]
    decay, own_lr = settings.weight_decay, settings.bias_base_lr
    if not settings.exclude_bias_and_norm and own_lr is None:
        return [{"params": list(module.parameters()), "weight_decay": decay, "lr_share": 1.0}]
    vectors = {"weight_decay": decay, "lr_share": 1.0 if own_lr is None else own_lr / settings.base_lr}
    if settings.exclude_bias_and_norm:
        vectors["weight_decay"] = 0.0
        if settings.name == "lars":
            vectors["adapt"] = False
    return [
        {"params": [p for p in module.parameters() if p.ndim > 1], "weight_decay": decay, "lr_share": 1.0},
        {"params": [p for p in module.parameters() if p.ndim <= 1], **vectors},
    ]


def build_optimizer(module: nn.Module, settings: config.Optimizer, constant: nn.Module | None = None) -> Gated:
    """The optimizer of a configuration; the schedule sets its learning rate before each step.

    Args:
        constant: see `parameter_groups`.
    """
    groups, clip_norm = parameter_groups(module, settings, constant), settings.clip_norm
    if settings.name == "adamw":
        betas = (settings.momentum, settings.second_momentum)
        return AdamW(groups, lr=settings.base_lr, betas=betas, clip_norm=clip_norm)
    if settings.name == "lars":
        trust = settings.trust_coefficient
        return LARS(groups, settings.base_lr, settings.momentum, trust_coefficient=trust, clip_norm=clip_norm)
    return SGD(groups, lr=settings.base_lr, momentum=settings.momentum, clip_norm=clip_norm)
