"""`evaluate.knn(run, k=20)` and the others: one function for each `unigrad-fast evaluate` command."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unigrad_fast.commands import COMMANDS
from unigrad_fast.interface.calls import Function, function_of
from unigrad_fast.interface.results import Result, Table

__all__ = [name.removeprefix("evaluate ") for name in COMMANDS if name.startswith("evaluate ")]
globals().update({name: function_of(f"evaluate {name}") for name in __all__})


if TYPE_CHECKING:
    list: Function[Table]

    def __getattr__(name: str) -> Function[Result]: ...
else:

    def __getattr__(name):
        raise AttributeError(f"evaluate.{name}: no such evaluation; there are {', '.join(__all__)}")
