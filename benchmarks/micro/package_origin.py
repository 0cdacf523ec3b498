"""A pytest plugin for `compare`: the package is imported from the compared checkout, or not at all.

Otherwise an installed package could be measured instead, even if only for a module that the checkout lacks.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

import pytest


class OnlyTheCheckout:
    """Finds the package's modules only below one folder; precedes all other finders."""

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
    sys.meta_path.insert(0, OnlyTheCheckout(Path(os.environ["UNIGRAD_COMPARED"]).resolve()))
    assert "unigrad_fast" not in sys.modules, "the package was imported before the benchmarks"
    try:
        import unigrad_fast  # noqa: F401
    except ModuleNotFoundError:
        raise pytest.UsageError("package unigrad_fast not found; give a commit that has it") from None
