"""The encoded images of a rank's micro-batch, and the images that could not be used for it."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

SILENT = "it could not be read within"  # start of the reason when a file did not answer
UNOPENED = "the file cannot be opened"  # start of the reason when the storage gave an error
FEW = 5  # bad images that are allowed in a set of at least ten times as many


def allowed(images: int, fraction: float) -> float:
    """How many of a set's images may be bad: this share of them, or a few in a small set; none if it is 0."""
    return max(fraction * images, min(FEW, images // 10)) if fraction else 0


@dataclass(frozen=True)
class Failure:
    """An image that was requested but could not be used.

    Attributes:
        step: step of the micro-batch, as in `Batch`.
        image: its position in the manifest.
        path, reason: texts for messages.
    """

    step: int
    image: int
    path: str
    reason: str

    @property
    def may_pass(self) -> bool:
        """Whether it is the storage that failed, and not the image: another attempt may succeed."""
        return self.reason.startswith((SILENT, UNOPENED))


@dataclass
class Supply:
    """The encoded images of one micro-batch of one rank.

    Attributes:
        step, epoch: of the micro-batch.
        asked: int64 [N], the images of the order; the random numbers of each place belong to them.
        index: int64 [N], the images that were taken, -1 for none.
        data: their encoded bytes, uint8.
        failures: images that could not be used.
        lost: why images are repeated here (nothing else could be read in time); empty if none are.
        drawn: the random parameters of the augmentation, set by whoever makes the views.
    """

    step: int
    epoch: int
    asked: np.ndarray
    index: np.ndarray
    data: list[np.ndarray]
    failures: list[Failure] = field(default_factory=list)
    lost: str = ""
    drawn: Any = None

    @property
    def replaced(self) -> np.ndarray:
        """Bool [N], True where another image was taken."""
        return self.index != self.asked
