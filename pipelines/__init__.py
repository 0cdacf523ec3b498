"""JPEG files on disk to augmented views on the device.

    which images there are   manifest, by the modules of listing, which remember what they found; part takes some
    which are in a step      order, and parameters of their augmentation, both from the random bits of philox
    reading them             reading; its damage finds what cannot be used, its replacement chooses others
    decoding, augmenting     stream runs a graph of DALI, on a CPU followed by cpu_views; cutmix mixes
    handing them over        loader, evaluation_loader
    tar shards               shards, which reads, packs and verifies them
    looking at every image   scan
    what lies on the disk    files

Nothing heavy is imported until it is used: torch, Pillow and DALI load on the first access of a name
that needs them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .batch import Batch
    from .cutmix import CutMix, Mix
    from .errors import DataError
    from .evaluation_loader import EvaluationLoader
    from .loader import Loader
    from .manifest import Manifest
    from .presets import PRESETS, Growth, Preset, View, preset_views
    from .reading.supply import Failure

_HOME = {
    "Batch": "batch",
    "CutMix": "cutmix",
    "DataError": "errors",
    "EvaluationLoader": "evaluation_loader",
    "Failure": "reading.supply",
    "Growth": "presets",
    "Loader": "loader",
    "Manifest": "manifest",
    "Mix": "cutmix",
    "PRESETS": "presets",
    "Preset": "presets",
    "View": "presets",
    "preset_views": "presets",
}
__all__ = [
    "PRESETS",
    "Batch",
    "CutMix",
    "DataError",
    "EvaluationLoader",
    "Failure",
    "Growth",
    "Loader",
    "Manifest",
    "Mix",
    "Preset",
    "View",
    "preset_views",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
