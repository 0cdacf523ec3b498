"""The number of compute threads of a measurement, which its processes share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from unigrad_fast.runtime.processors import VARIABLE, compute_threads


@contextmanager
def fitting_threads(asked: int | None = None, key: str = VARIABLE) -> Iterator[None]:
    """`compute_threads` on this machine's device; prints what it says."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with compute_threads(device, asked, key=key) as threads:
        for line in filter(None, [threads.said, threads.warning]):
            print(line, flush=True)
        yield
