"""Where the images of a manifest are: one interface for files, for files that hold many, and for Datasets.

    Files     an image per file
    Ranges    images at an offset of a larger file: tar shards, Arrow and Parquet files
    Items     items of a Dataset in this process, in `items.py`

`Manifest` has the table of what can be opened.
"""

import contextlib
import io
import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from .files.headers import read_size, size_in
from .files.places import Place, read_place
from .shards.archives import Shards
from .shards.index import Index

_HEAD = 1 << 16  # bytes to read of an image in a larger file for its header; if they do not suffice, all are read


class Storage:
    """The images of a manifest, by position.

    Attributes:
        on_disk: whether any process can read an image by its place, and sizes are listed before images are read.
        contents: digest of what is stored, where names and sizes do not tell it from other images.
    """

    on_disk = True
    contents = ""

    def place(self, image: int) -> Place:
        """Where the encoded image is on the disk, for `read_place`."""
        raise NotImplementedError

    def file(self, image: int) -> bytes:
        """Path of the file that holds an image on the disk."""
        raise NotImplementedError

    def size(self, image: int) -> tuple[int, int]:
        """Width and height from the header. Raises OSError if it has none."""
        raise NotImplementedError

    def part(self, positions: np.ndarray, names: np.ndarray, offsets: np.ndarray) -> "Storage":
        """The images at some positions, int64 [n], which have these names as of `names_at`."""
        raise NotImplementedError

    def read(self, image: int) -> bytes | memoryview:
        """The encoded image. Raises OSError if it cannot be read. Safe in threads and forked processes."""
        return read_place(self.place(image))

    def state(self, image: int) -> tuple[int, int]:
        """Current bytes and modification time in ns of the image's file. Raises OSError if it is gone."""
        found = os.stat(self.file(image))
        return found.st_size, found.st_mtime_ns

    def files(self, images: Iterable[int]) -> list[str]:
        """Paths of the files that hold some images, each once, in order."""
        return list(dict.fromkeys(os.fsdecode(self.file(image)) for image in images))

    def found_again(self) -> "Storage":
        """The same images as this process sees them, listed by another one. Raises DataError if they differ."""
        return self

    def cached(self) -> dict[str, np.ndarray]:
        """What the cache keeps beside the sizes."""
        return {}


@dataclass(frozen=True, eq=False)
class Files(Storage):
    """An image per file; arguments as in `Manifest`."""

    root: str
    names: np.ndarray = field(repr=False)
    offsets: np.ndarray = field(repr=False)

    def place(self, image: int) -> bytes:
        name = self.names[self.offsets[image] : self.offsets[image + 1]].tobytes()
        return os.path.join(os.fsencode(self.root), name)

    file = place

    def size(self, image: int) -> tuple[int, int]:
        return read_size(self.place(image))

    def part(self, positions: np.ndarray, names: np.ndarray, offsets: np.ndarray) -> "Files":
        return Files(self.root, names, offsets)


@dataclass(frozen=True, eq=False)
class Ranges(Storage):
    """Images at an offset of a larger file.

    Attributes:
        shards: the larger files.
        index: where in them the images are.
        kept: further arrays for the cache.
    """

    shards: Shards
    index: Index = field(repr=False)
    kept: dict[str, np.ndarray] = field(default_factory=dict, repr=False)

    def place(self, image: int) -> Place:
        shard, at, length = (int(values[image]) for values in (self.index.shard, self.index.at, self.index.length))
        return (*self.shards.place(shard), at, length)

    def file(self, image: int) -> bytes:
        return os.fsencode(self.shards.path(self.index.shard[image]))

    def size(self, image: int) -> tuple[int, int]:
        *shard, at, length = self.place(image)
        head = read_place((*shard, at, min(_HEAD, length)))
        with contextlib.suppress(OSError):
            return size_in(io.BytesIO(head))
        return size_in(io.BytesIO(self.read(image)))

    def part(self, positions: np.ndarray, names: np.ndarray, offsets: np.ndarray) -> "Ranges":
        index = self.index
        at = {key: getattr(index, key)[positions] for key in ("shard", "at", "length")}
        labels = index.labels[positions] if len(index.labels) else index.labels
        return replace(self, index=replace(index, names=names, offsets=offsets, labels=labels, **at))

    def found_again(self) -> "Ranges":
        return replace(self, shards=self.shards.found_again())

    def cached(self) -> dict[str, np.ndarray]:
        return {**self.kept, **vars(self.index)}


def joined(names: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Names (uint8, concatenated) and offsets (int64 [n + 1]) of images."""
    lengths = np.fromiter(map(len, names), np.int64, len(names))
    return np.frombuffer(b"".join(names), np.uint8), np.concatenate([[0], np.cumsum(lengths)])


def names_at(names: np.ndarray, offsets: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Names (uint8, concatenated) and offsets (int64 [n + 1]) of the images at some positions."""
    lengths = np.diff(offsets)[positions]
    starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    return names[np.repeat(offsets[positions] - starts[:-1], lengths) + np.arange(starts[-1])], starts
