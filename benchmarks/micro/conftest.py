"""Fixtures of the micro-benchmarks, `test_*.py`.

They know the package by public names alone and import them when they run, so that `compare` can measure an older commit
with them.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def public() -> Callable[[str], Any]:
    """Gives a public name, "module:name"; where `compare` measures a commit that lacks it, the benchmark is skipped."""

    def find(name: str) -> Any:
        module, _, attribute = name.partition(":")
        try:
            return getattr(importlib.import_module(module), attribute)
        except (AttributeError, ModuleNotFoundError) as error:
            # A package that is not installed is no name of ours.
            ours = isinstance(error, AttributeError) or str(error.name).startswith("unigrad_fast")
            if ours and "UNIGRAD_COMPARED" in os.environ:
                pytest.skip(f"{name} is not there")
            raise

    return find


@pytest.fixture(scope="session")
def device() -> Any:
    """The GPU, if there is one."""
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def measure(benchmark: Any, device: Any) -> Callable[..., None]:
    """Times a function, until the device is done with it; takes what `benchmark.pedantic` takes, or nothing more."""
    import torch

    def timed(run: Callable[[], object], **rounds: int) -> None:
        def until_done() -> None:
            run()
            if device.type == "cuda":
                torch.cuda.synchronize(device)

        if rounds:
            benchmark.pedantic(until_done, **rounds)
        else:
            benchmark(until_done)

    return timed
