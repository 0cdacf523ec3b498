"""Images, in files or in memory, to augmented views on the device.

    listing images           manifest, with the modules of listing, which cache results
    images of a step         order, and parameters for their augmentation, both from the random bits of philox
    reading                  reading, apart in another process; damage finds unusable images, replacement others
    decoding, augmenting     stream runs a DALI graph, on a CPU followed by cpu_views; cutmix mixes; presets
    batches                  loader, evaluation_loader; shortened prints them
    where images are         storage; spelling has the prefixes of sources
    tar shards               shards, which reads, packs and verifies them
    Arrow and Parquet        tables, which finds the images in them
    Datasets                 items, which turns what they return into encoded bytes
    checking every image     scan
    files on the disk        files
    time-outs                clock, which notices that the process was suspended

torch, Pillow and DALI are imported on the first access of a name that needs them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .batch import Batch as Batch
    from .cutmix import CutMix as CutMix
    from .cutmix import Mix as Mix
    from .errors import DataError as DataError
    from .evaluation_loader import EvaluationLoader as EvaluationLoader
    from .loader import Loader as Loader
    from .manifest import Manifest as Manifest
    from .presets import PRESETS as PRESETS
    from .presets import Growth as Growth
    from .presets import Preset as Preset
    from .presets import View as View
    from .presets import preset_views as preset_views
    from .reading.supply import Failure as Failure

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
__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
