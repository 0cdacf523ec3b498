"""Objectives: `UniGrad`, the other methods, and `build` to get one by name.

Names load on first access, so importing this package does not import torch; the catalogue of methods does not need it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .forms import ROWS, GradientForm, Row
    from .layout import Mix
    from .methods import build
    from .output import ObjectiveOutput
    from .unigrad import UniGrad

_HOME = {
    "ROWS": "forms",
    "GradientForm": "forms",
    "Mix": "layout",
    "ObjectiveOutput": "output",
    "Row": "forms",
    "UniGrad": "unigrad",
    "build": "methods",
}
__all__ = ["ROWS", "GradientForm", "Mix", "ObjectiveOutput", "Row", "UniGrad", "build"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value
