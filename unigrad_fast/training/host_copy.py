"""Copies numbers from the device to the host without either waiting for the other."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor


class HostCopy:
    """Messages of a few numbers, each sent in one step and read in a later one, after it has arrived."""

    def __init__(self) -> None:
        self._messages: deque[tuple[int, Tensor, torch.cuda.Event | None]] = deque()

    def send(self, step: int, numbers: Tensor) -> None:
        """Start copying a one-dimensional tensor, after the work already queued on the current stream."""
        if numbers.is_cuda:
            host = torch.empty(numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=True)
            host.copy_(numbers, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        else:
            host, event = numbers.clone(), None
        self._messages.append((step, host, event))

    def receive(self, before: int) -> list[tuple[int, list[float]]]:
        """The messages of the steps before `before` that have not been received yet, oldest first."""
        received = []
        while self._messages and self._messages[0][0] < before:
            step, host, event = self._messages.popleft()
            if event is not None:
                event.synchronize()
            received.append((step, host.tolist()))
        return received
