"""What a micro-batch of a rank is made of, before it is decoded, and which images could not be used for it."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

SILENT = "it could not be read within"  # how the reason begins of a file that did not answer


@dataclass(frozen=True)
class Failure:
    """An image that was asked for and could not be used.

    Attributes:
        step: of the micro-batch, as in `Batch`.
        image: its position in the manifest.
        path, reason: for people.
    """

    step: int
    image: int
    path: str
    reason: str


@dataclass
class Supply:
    """What one micro-batch of one rank is made of.

    Attributes:
        step, epoch: which one it is.
        asked: int64 [N], the images of the order; the randomness of each place belongs to them.
        index: int64 [N], the images that are taken, -1 for none.
        data: their encoded bytes, uint8.
        failures: what could not be used.
        lost: why images stand more than once here, for nothing else could be read in time; empty where none do.
        drawn: the randomness of its augmentation, of whoever makes views of it.
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
        """Bool [N]."""
        return self.index != self.asked
