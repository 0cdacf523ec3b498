"""Fixtures of the micro-benchmarks, `test_*.py`.

Benchmarks use only public names of the package and import them at run time, so that `compare` can measure an older
commit with them.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def public() -> Callable[[str], Any]:
    """Returns a public name, "module:name"; the benchmark is skipped if `compare` measures a commit that lacks it."""

    def find(name: str) -> Any:
        module, _, attribute = name.partition(":")
        try:
            return getattr(importlib.import_module(module), attribute)
        except (AttributeError, ModuleNotFoundError) as error:
            # Other packages that are missing are errors.
            ours = isinstance(error, AttributeError) or str(error.name).startswith("unigrad_fast")
            if ours and "UNIGRAD_COMPARED" in os.environ:
                pytest.skip(f"{name} does not exist")
            raise

    return find


@pytest.fixture(scope="session")
def device() -> Any:
    """The GPU, if there is one."""
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def measure(benchmark: Any, device: Any) -> Callable[..., None]:
    """Times a function until the device has finished; keywords, if any, are those of `benchmark.pedantic`."""
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
