"""The positions of images in tar shards, and the index file that stores them."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..files.npz_files import DAMAGED, read_arrays, within
from .archives import Shards

INDEX = "index.npz"  # next to the shards: the arrays of `Index`, and more
_DTYPES = {
    "names": np.uint8,
    "offsets": np.int64,
    "shard": np.int32,
    "at": np.int64,
    "length": np.int64,
    "labels": np.int64,
}


@dataclass(frozen=True, eq=False)
class Index:
    """Positions of the images in some shards, in the order of the shards and within them.

    Attributes:
        names: uint8, every `SHARD/MEMBER`, concatenated.
        offsets: int64 [n + 1], where each name starts in `names`.
        shard: int32 [n], positions in the shards' files.
        at, length: int64 [n], offset of an image in its shard and its size, bytes.
        labels: int64 [n], positions in `classes`; empty without labels.
        classes: unicode [classes].
    """

    names: np.ndarray
    offsets: np.ndarray
    shard: np.ndarray
    at: np.ndarray
    length: np.ndarray
    labels: np.ndarray
    classes: np.ndarray

    def fits(self, shards: Shards) -> bool:
        """Whether all dtypes and values are valid for these shards."""
        if (
            any(array.ndim != 1 for array in vars(self).values())
            or any(getattr(self, key).dtype != dtype for key, dtype in _DTYPES.items())
            or self.classes.dtype.kind != "U"
        ):
            return False
        count = len(self.shard)
        if not (
            count
            and len(self.offsets) == count + 1
            and len(self.at) == len(self.length) == count
            and len(self.labels) in (0, count)
            and within(self.labels, len(self.classes))
            and within(self.shard, len(shards.tars))
            and self.offsets[0] == 0
            and self.offsets[-1] == len(self.names)
            and (self.offsets[:-1] <= self.offsets[1:]).all()
            and (self.at >= 0).all()
            and (self.length >= 0).all()
        ):
            return False
        return bool((self.at <= shards.states[self.shard, 0] - self.length).all())  # a sum could overflow


def load(path: Path, shards: Shards) -> dict[str, np.ndarray] | None:
    """Arrays of the index next to the shards; None if there is none, or it is damaged or belongs to others.

    Modification times are not compared, because a copy on another machine may have different ones.
    """
    with suppress(*DAMAGED):
        arrays = read_arrays(path)
        same = arrays["files"].tolist() == shards.files and np.array_equal(arrays["bytes"], shards.states[:, 0])
        if same and np.array_equal(arrays["ends"], shards.ends):
            return arrays
    return None


def missing(path: Path, shards: Shards) -> list[str]:
    """Files that the index lists but that do not exist."""
    with suppress(*DAMAGED), np.load(path) as content:
        if content["files"].dtype.kind == "U":
            return sorted(set(content["files"].tolist()) - set(shards.files))
    return []
