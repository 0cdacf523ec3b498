"""The images at a path: names, sizes, labels and a fingerprint, compact enough for millions of files.

Names are relative to the root and concatenated in one array of bytes; a million files take about 60 MB.
"""

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from . import items
from .errors import DataError
from .files.headers import EXTENSIONS, reason
from .files.places import Place
from .files.slow_storage import CHUNK, file_states, spread
from .listing.cache import cache_file, digest, fits, recall, remember, sizes_in
from .listing.folders import holds_images, list_folder
from .listing.labels import number_labels
from .listing.shards import LEFT_OUT, list_shards
from .listing.text import list_text, not_there
from .shards.archives import COMPRESSED, ENDING, Shards, tar_files
from .spelling import DATASET, HUGGING_FACE, PARQUET, absolute_source, kind_of
from .storage import Files, Ranges, Storage, joined, names_at
from .tables.finding import ENDING as PARQUET_ENDING
from .tables.finding import Tables, find_hugging_face, find_parquet
from .tables.listing import list_tables


def _absolute(path: str | os.PathLike) -> str:
    return os.path.abspath(os.path.expanduser(os.fspath(path)))


@dataclass(frozen=True, eq=False)
class Manifest:
    """The images of a folder, a list, tar shards, tables or a Dataset, in a fixed order.

    Attributes:
        root: the folder that names are relative to.
        names: uint8, all names, relative to the root and concatenated.
        offsets: int64 [n + 1], where each name starts in `names`.
        sizes: int32 [n, 2], width and height from the file's header; 0, 0 if it cannot be read, which the next
            start tries again; -1, -1 for images that were found unusable. Of a Dataset 0, 0 until an item is read.
        labels: int64 [n] positions in `classes`, or None without labels.
        classes: names of the classes: names of folders and other texts are sorted, integer labels are in order.
        fingerprint: hex digest of all names, file sizes and modification times, and of the ends of shards.
        lengths: int64 [n], size of each encoded image, bytes; -1 for a file that is gone.
        storage: where the images are.
    """

    root: str
    names: np.ndarray = field(repr=False)
    offsets: np.ndarray = field(repr=False)
    sizes: np.ndarray = field(repr=False)
    labels: np.ndarray | None = field(repr=False)
    classes: list[str] = field(repr=False)
    fingerprint: str
    lengths: np.ndarray = field(repr=False)
    storage: Storage = field(repr=False)
    _store: Path | None = field(default=None, repr=False)
    _marked: dict[int, tuple[int, int]] = field(default_factory=dict, repr=False)  # sizes of unusable images

    @classmethod
    def open(cls, source: Any, cache: str | os.PathLike | None = None) -> "Manifest":
        """Lists the images of a source: a path or what `spelling.py` lists, as text; or a Dataset.

        A folder with .tar files and no images holds shards. Image sizes, and for shards and tables the index, are read
        from the headers and cached until a name, size or modification time, or an end of a shard, changes.

        Args:
            source: as in `from_folder`, `from_list`, `from_shards`, `from_hugging_face` (behind `hf:`), `from_parquet`
                (behind `parquet:`) or `from_dataset`.
            cache: folder of the cache; None for `$UNIGRAD_CACHE`, or `~/.cache/unigrad-fast`. If it cannot be
                written, nothing is cached.

        Raises:
            DataError: the path does not exist, has a mistake, or holds no image that can be read.
        """
        if not isinstance(source, (str, os.PathLike)):
            return cls.from_dataset(source)
        kind, source = kind_of(absolute_source(source))
        if kind:
            return _OPENERS[kind](source, cache)
        if os.path.isdir(source):
            is_shards = tar_files(source) and not holds_images(source)
            return cls.from_shards(source, cache) if is_shards else cls.from_folder(source, cache)
        if not os.path.exists(source):
            raise DataError(f"{source} does not exist; give a folder of images, a list of them, or .tar shards")
        if source.lower().endswith(EXTENSIONS):
            raise DataError(f"{source} is an image; give the folder that holds the images, or a list of them")
        if source.lower().endswith(PARQUET_ENDING):
            return cls.from_parquet(source, cache)
        is_tar = source.lower().endswith((ENDING, *COMPRESSED))
        return cls.from_shards(source, cache) if is_tar else cls.from_list(source, cache)

    @classmethod
    def from_folder(cls, path: str | os.PathLike, cache: str | os.PathLike | None = None) -> "Manifest":
        """Reads an ImageFolder tree (`CLASS/**/*.jpg`), or a flat folder of images, which has no labels.

        Images are sorted by class and name. Classes are as in `listing.classes`. Hidden files and folders, and class
        folders without an image, are ignored; other files are counted in a warning.

        Args:
            path: the folder.
            cache: as in `open`.

        Raises:
            DataError: the folder is missing, unreadable or holds no image that can be read.
        """
        root = _absolute(path)
        classes, counts, names = list_folder(root)
        labels = np.repeat(np.arange(len(classes)), counts) if classes else None
        return cls._of_files(root, root, names, file_states(root, names), labels, classes, cache)

    @classmethod
    def from_list(cls, path: str | os.PathLike, cache: str | os.PathLike | None = None) -> "Manifest":
        """Reads a text file with the path of an image per line, and keeps its order.

        Paths are relative to the file's folder, or to ~. A label, an integer or a name, may follow a TAB; if every line
        ends with one blank and an integer, these are the labels. Blank lines and lines that start with # are skipped.

        Args:
            path: the text file.
            cache: as in `open`.

        Raises:
            DataError: a file is missing, only some lines have labels, or no image can be read.
        """
        source = _absolute(path)
        root = os.path.dirname(source)
        numbers, names, texts = list_text(source)
        states = file_states(root, names)
        if len(missing := np.flatnonzero(states[:, 0] < 0)):
            raise DataError(not_there(source, numbers, names, missing.tolist()))
        labels, classes = number_labels(texts, lambda image: f"{source}, line {numbers[image]}")
        return cls._of_files(source, root, names, states, labels, classes, cache)

    @classmethod
    def from_files(cls, paths: Iterable[str | os.PathLike]) -> "Manifest":
        """The images in some files, in their order, without labels; nothing is cached.

        Raises:
            DataError: none of them can be read.
        """
        names = [os.fsencode(_absolute(path)) for path in paths]
        return cls._of_files(os.sep, os.sep, names, file_states(os.sep, names), None, [], None, is_cached=False)

    @classmethod
    def from_shards(cls, path: str | os.PathLike, cache: str | os.PathLike | None = None) -> "Manifest":
        """Reads a tar file in the layout of WebDataset, or a folder of them, sorted by name.

        Images keep their order within the shards. Labels come from .cls or .json files with the same key, otherwise
        from the images' folders, as in a tree; `classes.txt` next to the shards may name the classes, a line each. The
        headers are scanned once: afterwards the index is in the cache, or next to shards that `unigrad-fast data shard`
        wrote.

        Args:
            path: the .tar file, or the folder.
            cache: as in `open`.

        Raises:
            DataError: a shard is missing, compressed, damaged or without images, or labels are missing or wrong.
        """
        source = _absolute(path)
        shards = Shards.find(source)
        fingerprint = digest(shards.files, shards.states, shards.ends)
        store = cache_file(source, cache)
        index, content, known = list_shards(source, shards, recall(store, fingerprint))
        kept = {LEFT_OUT: content[LEFT_OUT]}
        return cls._of_ranges(Ranges(shards, index, kept), fingerprint, store, content, changed=not known)

    @classmethod
    def from_hugging_face(cls, rest: str, cache: str | os.PathLike | None = None) -> "Manifest":
        """Reads what `datasets` saved with `save_to_disk`, or a folder of Parquet files as on Hugging Face's hub.

        Encoded images are read as they are, without `datasets`. Their order is that of the rows; classes are those of
        the ClassLabel.

        Args:
            rest: PATH[:SPLIT[:IMAGES[:LABELS]]], where IMAGES and LABELS are names of columns.
            cache: as in `open`; images that are compressed are copied there once.

        Raises:
            DataError: pyarrow is not installed; the folder, the split or a column does not exist, or there are several;
                or a file is damaged.
        """
        rest = _absolute(rest)
        return cls._of_tables(f"{HUGGING_FACE}:{rest}", find_hugging_face(rest), cache)

    @classmethod
    def from_parquet(cls, rest: str, cache: str | os.PathLike | None = None) -> "Manifest":
        """Reads a Parquet file, or a folder of them, with a column of encoded images.

        Args:
            rest: PATH[:IMAGES[:LABELS]], where IMAGES and LABELS are names of columns.
            cache: as in `open`; images that are compressed are copied there once.

        Raises:
            DataError: as `from_hugging_face`.
        """
        rest = _absolute(rest)
        return cls._of_tables(f"{PARQUET}:{rest}", find_parquet(rest), cache)

    @classmethod
    def from_dataset(cls, dataset: Any) -> "Manifest":
        """Takes the images of a Dataset in this process: anything with a length and `dataset[i]`.

        Items are as `items.py` describes them. They are read by several threads at once, when a batch needs them; only
        `items.SAMPLED` evenly spaced ones are read now, whose digest and number are the fingerprint. Nothing is cached.

        Raises:
            DataError: as `items.give`.
        """
        return cls._of_items(items.give(dataset), dataset)

    @classmethod
    def _given(cls, rest: str, cache: str | os.PathLike | None) -> "Manifest":
        source = f"{DATASET}:{rest}"
        return cls._of_items(source, items.given(source))

    @classmethod
    def _of_items(cls, source: str, dataset: Any) -> "Manifest":
        count = len(dataset)
        if not (mean := items.mean_bytes(source)):
            raise DataError(f"{source}: none of {items.SAMPLED} evenly spaced items can be read; repair the Dataset")
        labels, classes = items.labels_of(dataset)
        names, offsets = joined([b"%07d" % place for place in range(count)])
        return cls(
            root=source,
            names=names,
            offsets=offsets,
            sizes=np.zeros((count, 2), np.int32),
            labels=labels,
            classes=classes,
            fingerprint=digest([source], b"" if labels is None else labels, classes),
            lengths=np.full(count, mean),
            storage=items.Items(source, np.arange(count)),
        )

    @classmethod
    def _of_tables(cls, source: str, tables: Tables, cache: str | os.PathLike | None) -> "Manifest":
        files = Shards.of(tables.root, tables.files)
        fingerprint = digest([*tables.files, tables.images, tables.labels], files.states, files.ends)
        store = cache_file(source, cache)
        content = recall(store, fingerprint)
        index, shards, kept, known = list_tables(tables, files, content, store)
        ranges = Ranges(shards, index, kept)
        return cls._of_ranges(ranges, fingerprint, store, content if known else {}, changed=not known)

    @classmethod
    def _of_ranges(
        cls, storage: Ranges, fingerprint: str, store: Path | None, content: dict[str, np.ndarray], changed: bool
    ) -> "Manifest":
        index = storage.index
        manifest = cls(
            root=storage.shards.root,
            names=index.names,
            offsets=index.offsets,
            sizes=sizes_in(content, len(index.shard)),
            labels=index.labels if len(index.labels) else None,
            classes=index.classes.tolist(),
            fingerprint=fingerprint,
            lengths=index.length,
            storage=storage,
            _store=store,
        )
        return manifest._ready(content, changed)

    @classmethod
    def _of_files(
        cls,
        source: str,
        root: str,
        names: list[bytes],
        states: np.ndarray,
        labels: np.ndarray | None,
        classes: list[str],
        cache: str | os.PathLike | None,
        is_cached: bool = True,
    ) -> "Manifest":
        joined_names, offsets = joined(names)
        lengths = np.diff(offsets).astype(np.int32)
        named = () if source == root or labels is None else (labels, classes)
        fingerprint = digest(joined_names, lengths, states, *named)
        store = cache_file(source, cache) if is_cached else None
        content = recall(store, fingerprint)
        if not fits(content, len(names)):
            content = {}
        manifest = cls(
            root=root,
            names=joined_names,
            offsets=offsets,
            sizes=sizes_in(content, len(names)),
            labels=labels,
            classes=classes,
            fingerprint=fingerprint,
            lengths=states[:, 0].copy(),
            storage=Files(root, joined_names, offsets),
            _store=store,
        )
        return manifest._ready(content)

    def _ready(self, content: dict[str, np.ndarray], changed: bool = False) -> "Manifest":
        """Completes sizes and marks from the cache, and caches new ones."""
        self._mark(content.get("unusable", ()))
        if self._read_missing_sizes() or changed:
            self._remember()
        if not (self.sizes > 0).any():
            where = self.root if isinstance(self.storage, Files) else os.fsdecode(self.storage.file(0))
            raise DataError(f"none of the {len(self)} images in {where} can be read; {self.complaint(0)}")
        return self

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def has_labels(self) -> bool:
        return self.labels is not None

    @property
    def total_bytes(self) -> int:
        """Size of all encoded images."""
        return int(self.lengths.clip(0).sum())

    @property
    def used_classes(self) -> int:
        """Number of classes that have images: integer labels may be far apart."""
        return 0 if self.labels is None else int(np.count_nonzero(np.bincount(self.labels)))

    def path_bytes(self, index: int) -> bytes:
        """Path of one image, in the bytes of the file system; for an image in a shard `SHARD/MEMBER`, for display."""
        index = range(len(self))[index]
        name = self.names[self.offsets[index] : self.offsets[index + 1]].tobytes()
        return os.path.join(os.fsencode(self.root), name)

    def path(self, index: int) -> str:
        """Path of one image; `SHARD/MEMBER` in a shard."""
        return os.fsdecode(self.path_bytes(index))

    def read(self, index: int) -> bytes | memoryview:
        """The encoded image. Raises OSError if it cannot be read. Safe in threads and forked processes.

        The size of an item of a Dataset is known from here on. Raises DataError if it has changed.
        """
        index = range(len(self))[index]
        data = self.storage.read(index)
        if not self.storage.on_disk:
            self._learn(index, items.size_of(data))
        return data

    def _learn(self, index: int, size: tuple[int, int]) -> None:
        known = tuple(self.sizes[index].tolist())
        if known not in ((0, 0), size):
            raise DataError(
                f"{self.path(index)}: had {known[0]}x{known[1]} pixels and has {size[0]}x{size[1]}; an item must be "
                "the same each time: remove random transforms from the Dataset"
            )
        self.sizes[index] = size

    def place(self, index: int) -> Place:
        """Where the encoded image is, for `read_place`."""
        return self.storage.place(range(len(self))[index])

    def state(self, index: int) -> tuple[int, int]:
        """Current bytes and modification time in ns of an image's file or shard. Raises OSError if it is gone."""
        return self.storage.state(range(len(self))[index])

    def unreadable(self) -> np.ndarray:
        """Positions (int64) of images whose header could not be read or that were found unusable."""
        return np.flatnonzero(self.sizes[:, 0] <= 0) if self.storage.on_disk else np.zeros(0, np.int64)

    def mark_unusable(self, positions: Iterable[int]) -> None:
        """Sets sizes to -1, -1, and caches that until the fingerprint changes."""
        self._mark(positions)
        content = recall(self._store, self.fingerprint)
        if fits(content, len(self)):
            self._mark(content.get("unusable", ()))  # images that another process marked since
        self._remember()

    def header_sizes(self) -> np.ndarray:
        """Sizes (int32 [n, 2]) from the headers, including images that were found unusable; 0 for a Dataset."""
        sizes = self.sizes.copy() if self.storage.on_disk else np.zeros_like(self.sizes)
        for position, size in self._marked.items():
            sizes[position] = size
        return sizes

    def complaint(self, index: int) -> str:
        """The path of an image and what is wrong with it, as far as its header shows."""
        if self.sizes[index, 0] < 0:
            return f"{self.path(index)}: a scan found it unusable"
        try:
            self.storage.size(index)
        except OSError as error:
            return f"{self.path(index)}: {reason(error)}"
        return f"{self.path(index)}: it has changed since it was listed"

    def _read_missing_sizes(self) -> int:
        """Reads the headers of images without a size, and returns how many sizes it found."""
        missing = np.flatnonzero(self.sizes[:, 0] == 0)

        def read(start: int) -> None:
            for index in missing[start : start + CHUNK].tolist():
                with contextlib.suppress(OSError):
                    self.sizes[index] = self.storage.size(index)

        spread(read, range(0, len(missing), CHUNK))
        return int((self.sizes[missing, 0] > 0).sum())

    def _mark(self, positions: Iterable[int]) -> None:
        for position in positions:
            position = range(len(self))[position]
            self._marked.setdefault(position, tuple(self.sizes[position].tolist()))
            self.sizes[position] = -1

    def _remember(self) -> None:
        remember(
            self._store,
            fingerprint=self.fingerprint,
            sizes=self.header_sizes(),
            unusable=np.array(sorted(self._marked), np.int64),
            **self.storage.cached(),
        )


_OPENERS = {
    HUGGING_FACE: Manifest.from_hugging_face,
    PARQUET: Manifest.from_parquet,
    DATASET: Manifest._given,
}


def part(manifest: Manifest, positions: np.ndarray, labels: np.ndarray, classes: list[str]) -> Manifest:
    """A manifest of the images at some positions, under other labels; it caches nothing on the disk.

    Args:
        manifest: the whole manifest.
        positions: int64 [n], ascending.
        labels: int64 [n], positions in `classes`.
        classes: names of the classes.
    """
    names, offsets = names_at(manifest.names, manifest.offsets, positions)
    place = {position: number for number, position in enumerate(positions.tolist())}
    return replace(
        manifest,
        names=names,
        offsets=offsets,
        sizes=manifest.sizes[positions],
        lengths=manifest.lengths[positions],
        labels=labels,
        classes=classes,
        storage=manifest.storage.part(positions, names, offsets),
        _store=None,
        _marked={place[position]: size for position, size in manifest._marked.items() if position in place},
    )
