"""JPEG files on disk to augmented views on the device.

Nothing heavy is imported until it is used: torch, Pillow and DALI load on the first access of a name
that needs them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cutmix import CutMix, Mix
    from .errors import DataError
    from .loader import Batch, EvaluationLoader, Loader
    from .manifest import Manifest
    from .reading import Failure
    from .recipes import RECIPES, Growth, Recipe, View, recipe

_HOME = {
    "Batch": "loader",
    "CutMix": "cutmix",
    "DataError": "errors",
    "EvaluationLoader": "loader",
    "Failure": "reading",
    "Growth": "recipes",
    "Loader": "loader",
    "Manifest": "manifest",
    "Mix": "cutmix",
    "RECIPES": "recipes",
    "Recipe": "recipes",
    "View": "recipes",
    "recipe": "recipes",
}
__all__ = [
    "RECIPES",
    "Batch",
    "CutMix",
    "DataError",
    "EvaluationLoader",
    "Failure",
    "Growth",
    "Loader",
    "Manifest",
    "Mix",
    "Recipe",
    "View",
    "recipe",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
