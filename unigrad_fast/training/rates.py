"""The scheduled numbers of each step, in device memory."""

from __future__ import annotations

import struct

import torch

from unigrad_fast.optimization.gated import Gated


class Rates:
    """Learning rates, the target's momentum and the epoch as scalars on the device; one copy sends all of them.

    Each of the optimizer's groups holds its scalar as `lr` permanently, so a recorded CUDA graph reads the current
    step's rate from it.

    Args:
        optimizer: each of its groups has `lr_share`, a factor of the schedule's learning rate, or of the peak if the
            group is marked `constant`.

    Attributes:
        target_momentum, epoch: float64.
    """

    def __init__(self, optimizer: Gated, device: torch.device):
        groups = optimizer.param_groups
        self._shares = [(group["lr_share"], group.get("constant", False)) for group in groups]
        count = len(groups) + 2
        self._sent = torch.zeros(12 * count, dtype=torch.uint8, device=device)  # in float64, then in fp32
        exact, single = self._sent[: 8 * count].view(torch.float64), self._sent[8 * count :].view(torch.float32)
        rates = exact if optimizer.rate_dtype == torch.float64 else single
        for group, rate in zip(groups, rates[:-2].unbind(), strict=True):
            group["lr"] = rate
        self.target_momentum, self.epoch = exact[-2:].unbind()

    def send(self, learning_rate: float, peak: float, target_momentum: float, epoch: float) -> None:
        """Call before a step; the host does not wait.

        Args:
            epoch: epochs done so far, with fractions.
        """
        rates = [(peak if is_constant else learning_rate) * share for share, is_constant in self._shares]
        numbers = [*rates, target_momentum, epoch]
        packed = struct.pack(f"={len(numbers)}d{len(numbers)}f", *numbers, *numbers)
        host = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
        if self._sent.is_cuda:
            host = host.pin_memory()
        self._sent.copy_(host, non_blocking=True)
