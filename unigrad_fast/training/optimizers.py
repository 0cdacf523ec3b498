"""The optimizer of a configuration: its parameter groups and its settings."""

from __future__ import annotations

from torch import nn

from unigrad_fast import config
from unigrad_fast.optimization.lars import LARS
from unigrad_fast.optimization.sgd import SGD

__all__ = ["LARS", "SGD", "build_optimizer", "parameter_groups"]


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
