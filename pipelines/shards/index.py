"""Where each image lies in tar shards, and the file beside shards that says so."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..files.npz_files import DAMAGED, read_arrays, within
from .archives import Shards

INDEX = "index.npz"  # beside the shards: what `Index` holds, and more
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
    """Where the images of some shards lie, shard by shard and in the order within them.

    Attributes:
        names: uint8, every `SHARD/MEMBER`, end to end.
        offsets: int64 [n + 1], where each name starts in `names`.
        shard: int32 [n], positions in the shards' files.
        at, length: int64 [n], bytes: where an image starts in its shard, and how many it has.
        labels: int64 [n], positions in `classes`; empty where there are no labels.
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
        """Whether all types and numbers are possible for these shards."""
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
    """Arrays of the index beside the shards; None where there is none, or it is damaged or belongs to others.

    Modification times are not compared, for a copy on another machine may have others.
    """
    with suppress(*DAMAGED):
        arrays = read_arrays(path)
        if arrays["files"].tolist() == shards.files and np.array_equal(arrays["bytes"], shards.states[:, 0]):
            return arrays
    return None


def missing(path: Path, shards: Shards) -> list[str]:
    """Files that the index beside the shards lists and that are not there."""
    with suppress(*DAMAGED), np.load(path) as content:
        if content["files"].dtype.kind == "U":
            return sorted(set(content["files"].tolist()) - set(shards.files))
    return []
