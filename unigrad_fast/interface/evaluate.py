"""`evaluate.knn(run, k=20)` and the others: one function for each `unigrad-fast evaluate` command."""

from __future__ import annotations

from typing import Any

from unigrad_fast.commands import COMMANDS
from unigrad_fast.interface.calls import Function, function_of

__all__ = [name.removeprefix("evaluate ") for name in COMMANDS if name.startswith("evaluate ")]
globals().update({name: function_of(f"evaluate {name}") for name in __all__})


def __getattr__(name: str) -> Function[Any]:
    raise AttributeError(f"evaluate.{name}: no such evaluation; there are {', '.join(__all__)}")
