"""A batch of the loader: the views of some images, and which images they are."""

from dataclasses import dataclass, field

import torch

from .cutmix import Mix
from .reading.supply import Failure
from .shortened import Shortened


@dataclass(repr=False)
class Batch(Shortened):
    """One micro-batch of one rank.

    Attributes:
        views: fp32 [N, 3, S, S] each, channels-last, normalised, on the loader's device.
        index: int64 [N], positions in the manifest.
        label: int64 [N], -1 where the manifest has no labels.
        step: micro-batches since the start of the run.
        replaced: bool [N], True where another image replaces one that could not be used.
        mix: how to mix the global views (`mix.apply(views[:2])`); None without CutMix.
        failures: the images that could not be used, and why.
        lost: why the storage counts as lost, in which case images are repeated in this batch; otherwise empty.
    """

    views: list[torch.Tensor]
    index: torch.Tensor
    label: torch.Tensor
    step: int
    replaced: torch.Tensor
    mix: Mix | None = None
    failures: list[Failure] = field(default_factory=list)
    lost: str = ""
