"""The numbers that the schedules change from step to step, where the device reads them."""

from __future__ import annotations

import struct

import torch

from unigrad_fast.optimization.gated import Gated


class Rates:
    """Learning rates and the target's momentum, scalars on the device; all of them are sent at once.

    The optimizer's groups have theirs as `lr`, for good: a launch that was recorded finds the rate of its step there.

    Args:
        optimizer: each of its groups has `lr_share`, its part of the schedule's learning rate, or of the peak where it
            is marked `constant`.

    Attributes:
        target_momentum: float64.
    """

    def __init__(self, optimizer: Gated, device: torch.device):
        groups = optimizer.param_groups
        self._shares = [(group["lr_share"], group.get("constant", False)) for group in groups]
        count = len(groups) + 1
        self._sent = torch.zeros(12 * count, dtype=torch.uint8, device=device)  # in float64, then in fp32
        exact, single = self._sent[: 8 * count].view(torch.float64), self._sent[8 * count :].view(torch.float32)
        rates = exact if optimizer.rate_dtype == torch.float64 else single
        for group, rate in zip(groups, rates[:-1].unbind(), strict=True):
            group["lr"] = rate
        self.target_momentum = exact[-1]

    def send(self, learning_rate: float, peak: float, target_momentum: float) -> None:
        """Before a step; the host waits for nothing."""
        rates = [(peak if is_constant else learning_rate) * share for share, is_constant in self._shares]
        numbers = [*rates, target_momentum]
        packed = struct.pack(f"={len(numbers)}d{len(numbers)}f", *numbers, *numbers)
        host = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
        if self._sent.is_cuda:
            host = host.pin_memory()
        self._sent.copy_(host, non_blocking=True)
