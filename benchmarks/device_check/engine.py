"""A thin engine in place of DeepSpeed's at stage 0, for a machine without DeepSpeed: it computes the same."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor, nn

from unigrad_fast import config
from unigrad_fast.optimization.gated import Gated


class ThinEngine:
    """What a trainer asks of DeepSpeed's engine: forward under autocast, backward, the optimizer's step, counters.

    Args:
        module: the online encoder.
        images: images per rank and micro-batch.
        accumulation: micro-batches of a step.
        dtype: autocast's dtype, None for fp32.
    """

    def __init__(self, module: nn.Module, optimizer: Gated, images: int, accumulation: int, dtype: torch.dtype | None):
        self.module, self.optimizer = module, optimizer
        self.images, self.accumulation, self.dtype = images, accumulation, dtype
        self.global_steps = self.micro_steps = self.global_samples = self.skipped_steps = 0

    def __call__(self, views: list[Tensor]) -> list[Tensor]:
        device = views[0].device.type
        with torch.autocast(device, self.dtype, enabled=self.dtype is not None):
            return self.module(views)

    def is_gradient_accumulation_boundary(self) -> bool:
        return (self.micro_steps + 1) % self.accumulation == 0

    def backward(self, loss: Tensor) -> None:
        (loss / self.accumulation).backward()

    def step(self) -> None:
        if self.is_gradient_accumulation_boundary():
            self.optimizer.step()
            for parameter in self.module.parameters():
                parameter.grad = None
            self.global_steps += 1
            self.global_samples += self.images * self.accumulation
        self.micro_steps += 1

    def zero_optimization_stage(self) -> int:
        return 0

    def zero_round_robin_gradients(self) -> bool:
        return False

    def zero_elastic_checkpoint(self) -> bool:
        return False

    def load_universal_checkpoint(self) -> bool:
        return False


def build_thin_engine(
    module: nn.Module,
    optimizer: Gated,
    *,
    settings: config.Engine,
    micro_batch_size: int,
    dtype: torch.dtype | None,
    verbose: bool = False,
) -> ThinEngine:
    """As `training.engine.build_engine`."""
    module.to(memory_format=torch.channels_last)
    return ThinEngine(module, optimizer, micro_batch_size, settings.accumulation_steps, dtype)


@contextmanager
def available_engine() -> Iterator[str]:
    """Inside, trainers have DeepSpeed's engine, or the thin one without DeepSpeed; yields which."""
    from unigrad_fast.training import trainer

    if importlib.util.find_spec("deepspeed") is not None:
        yield "DeepSpeed's engine"
        return
    with mock.patch.object(trainer, "build_engine", build_thin_engine):
        yield "a thin engine"
