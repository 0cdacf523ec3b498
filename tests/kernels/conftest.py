"""Which kernel tests this process can run, and memory that shows what nobody wrote."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

# Triton is in its interpreter or compiles, for the life of a process: `interpreter.py` starts one for that folder.
collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreted"]


@pytest.fixture
def poisoned() -> Iterator[None]:
    """New memory holds NaN, and the largest number where it holds integers, until it is written."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
