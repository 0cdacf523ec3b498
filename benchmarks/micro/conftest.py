"""Fixtures of the micro-benchmarks, `test_*.py`.

Benchmarks use only public names of the package and import them at run time, so that `compare` can measure an older
commit with them.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

import pytest


class OnlyTheCheckout:
    """Finds the package's modules only below one folder; precedes all other finders.

    Otherwise an installed package could be measured instead, even if only for a module that the checkout lacks.
    """

    def __init__(self, checkout: Path):
        self.checkout = checkout

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        if name.partition(".")[0] != "unigrad_fast":
            return None
        found = PathFinder.find_spec(name, path)
        places = [] if found is None else [found.origin] if found.origin else list(found.submodule_search_locations)
        if not places or any(self.checkout not in Path(place).resolve().parents for place in places):
            raise ModuleNotFoundError(f"No module named {name!r} in {self.checkout}", name=name)
        return found


def pytest_sessionstart() -> None:
    """For `compare`: the package is imported from the compared checkout, or not at all."""
    if "UNIGRAD_COMPARED" not in os.environ:
        return
    sys.meta_path.insert(0, OnlyTheCheckout(Path(os.environ["UNIGRAD_COMPARED"]).resolve()))
    assert "unigrad_fast" not in sys.modules, "the package was imported before the benchmarks"
    try:
        import unigrad_fast  # noqa: F401
    except ModuleNotFoundError:
        raise pytest.UsageError("package unigrad_fast not found; give a commit that has it") from None


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
