"""JPEG files on disk to augmented views on the device.

    listing images           manifest, with the modules of listing, which cache results; part selects some images
    images of a step         order, and parameters for their augmentation, both from the random bits of philox
    reading                  reading; damage finds unusable images, replacement chooses others
    decoding, augmenting     stream runs a DALI graph, on a CPU followed by cpu_views; cutmix mixes; presets
    batches                  loader, evaluation_loader
    tar shards               shards, which reads, packs and verifies them
    checking every image     scan
    files on the disk        files
    time-outs                clock, which notices that the process was suspended

torch, Pillow and DALI are imported on the first access of a name that needs them.
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
