"""Which images lie at a path: names, sizes, labels and a fingerprint, compact enough for millions of files.

Names are relative to the root and lie end to end in one array of bytes; a million files take about 60 MB.
"""

import contextlib
import errno
import hashlib
import io
import os
import re
import stat
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from . import shards as tar_shards
from .errors import DataError
from .headers import ENDINGS, EXTENSIONS, read_size, reason, size_in
from .shards import Index, Shards

_THREADS = 8  # hides the latency of network storage
_CHUNK = 2048  # files per task of a thread
_HEAD = 1 << 16  # bytes of an image in a shard that are read for its header, before all are
_LARGEST_LABEL = 999_999
_SHOWN = 20  # characters of a label in a message
_TARS = (".tar", ".tgz", ".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst")


@dataclass(frozen=True, eq=False)
class Manifest:
    """The images of a folder, a list or tar shards, in a fixed order.

    Attributes:
        root: the folder that names are relative to.
        names: uint8, every name relative to the root, end to end.
        offsets: int64 [n + 1], where each name starts in `names`.
        sizes: int32 [n, 2], width and height as the file's header says; 0, 0 where it cannot be read, which the next
            start tries again; -1, -1 for images that were found unusable.
        labels: int64 [n] positions in `classes`, or None without labels.
        classes: names of the classes; of class folders and other names sorted, of integer labels by number.
        fingerprint: hex digest of all names, file sizes and modification times.
        total_bytes: of all encoded images.
        index: where images lie in shards; None for files.
    """

    root: str
    names: np.ndarray = field(repr=False)
    offsets: np.ndarray = field(repr=False)
    sizes: np.ndarray = field(repr=False)
    labels: np.ndarray | None = field(repr=False)
    classes: list[str] = field(repr=False)
    fingerprint: str
    total_bytes: int = 0
    index: Index | None = field(default=None, repr=False)
    shards: Shards | None = field(default=None, repr=False)
    _store: Path | None = field(default=None, repr=False)
    _marked: dict[int, tuple[int, int]] = field(default_factory=dict, repr=False)  # sizes of the unusable

    @classmethod
    def open(cls, path: str | os.PathLike, cache: str | os.PathLike | None = None) -> "Manifest":
        """The images of whatever lies at a path: a folder, a text file with a list, or tar shards.

        A folder with .tar files and no images holds shards. Image sizes, and of shards the index, come from the
        headers alone and are remembered in the cache until a name, size or modification time changes.

        Args:
            path: as in `from_folder`, `from_list` or `from_shards`.
            cache: folder of what is remembered; None for `$UNIGRAD_CACHE`, or `~/.cache/unigrad-fast`. One that
                cannot be written is not an error.

        Raises:
            DataError: there is nothing, it has a mistake, or it holds no image that can be read.
        """
        source = os.path.abspath(os.fspath(path))
        if os.path.isdir(source):
            is_shards = tar_shards.tar_files(source) and not _holds_images(source)
            return cls.from_shards(source, cache) if is_shards else cls.from_folder(source, cache)
        if not os.path.exists(source):
            raise DataError(f"{source} does not exist; give a folder of images, a list of them, or .tar shards")
        if source.lower().endswith(EXTENSIONS):
            raise DataError(f"{source} is an image; give the folder that holds the images, or a list of them")
        return cls.from_shards(source, cache) if source.endswith(_TARS) else cls.from_list(source, cache)

    @classmethod
    def from_folder(cls, path: str | os.PathLike, cache: str | os.PathLike | None = None) -> "Manifest":
        """Reads an ImageFolder tree (`CLASS/**/*.jpg`), or a flat folder of images, which has no labels.

        Sorted by class and name. Hidden files and folders are ignored, and so is a class folder without an image.

        Args:
            path: the folder.
            cache: as in `open`.

        Raises:
            DataError: the folder is missing, unreadable or holds no image that can be read.
        """
        root = os.path.abspath(os.fspath(path))
        classes, counts, names = _list_tree(root)
        labels = np.repeat(np.arange(len(classes)), counts) if classes else None
        return cls._of_files(root, root, names, _states(root, names), labels, classes, cache)

    @classmethod
    def from_list(cls, path: str | os.PathLike, cache: str | os.PathLike | None = None) -> "Manifest":
        """Reads a text file with the path of an image per line, in its order.

        Relative paths count from the file's folder. A label, an integer or a name, may follow a TAB; a list in
        which every line ends with one blank and an integer has its labels there. Blank lines and those that start
        with # are left out.

        Args:
            path: the text file.
            cache: as in `open`.

        Raises:
            DataError: a file is missing, some lines have labels and some not, or no image can be read.
        """
        source = os.path.abspath(os.fspath(path))
        root = os.path.dirname(source)
        lines = _lines(source)
        names, texts = _split_lines(source, lines)
        states = _states(root, names)
        missing = np.flatnonzero(states[:, 0] < 0)
        if len(missing):
            first = int(missing[0])
            more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
            raise DataError(
                f"{source}, line {lines[first][0]}: {os.fsdecode(os.path.join(os.fsencode(root), names[first]))} does "
                f"not exist or is not a file{more}; correct the path, which counts from the list's folder, or leave "
                "the line out; a label stands behind a TAB"
            )
        labels, classes = _number(texts, lambda image: f"{source}, line {lines[image][0]}")
        return cls._of_files(source, root, names, states, labels, classes, cache)

    @classmethod
    def from_shards(cls, path: str | os.PathLike, cache: str | os.PathLike | None = None) -> "Manifest":
        """Reads a tar file in the layout of WebDataset, or a folder of them, sorted by name.

        Images keep their order within the shards. Labels are .cls or .json files of the same key, else the images'
        folders where there are several; `classes.txt` beside the shards may name the classes, a line each. The headers
        are walked once: afterwards the index is in the cache, or lies beside shards that `unigrad-fast data shard`
        wrote.

        Args:
            path: the .tar file, or the folder.
            cache: as in `open`.

        Raises:
            DataError: a shard is missing, compressed, damaged, without images, or labels are missing or wrong.
        """
        source = os.path.abspath(os.fspath(path))
        shards = Shards.find(source)
        fingerprint = _digest("\0".join(shards.files).encode("utf-8", "surrogateescape"), shards.states)
        store = _cache_file(source, cache)
        content = _recall(store, fingerprint)
        index = _index(content, shards)
        known = index is not None
        if not known:
            beside = Path(shards.root, tar_shards.INDEX)
            if os.path.isdir(source) and (gone := tar_shards.missing(beside, shards)):
                raise DataError(
                    f"{os.path.join(shards.root, gone[0])}: missing, {len(gone)} of the shards that {beside} lists; "
                    "copy them again, or remove that file to do without them"
                )
            content = tar_shards.load(beside, shards) or {}
            index = _index(content, shards)
            if index is None and os.path.isdir(source) and os.path.exists(beside):
                warnings.warn(f"{beside} is damaged or belongs to other shards; it is not used", stacklevel=2)
        if index is None:
            index, content = _walk(source, shards), {}
        manifest = cls(
            root=shards.root,
            names=index.names,
            offsets=index.offsets,
            sizes=_sizes(content, len(index.shard)),
            labels=index.labels if len(index.labels) else None,
            classes=index.classes.tolist(),
            fingerprint=fingerprint,
            total_bytes=int(index.length.sum()),
            index=index,
            shards=shards,
            _store=store,
        )
        return manifest._ready(content, changed=not known)

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
    ) -> "Manifest":
        joined = b"".join(names)
        lengths = np.fromiter(map(len, names), np.int32, len(names))
        named = () if source == root or labels is None else (labels, "\0".join(classes).encode("utf-8", "replace"))
        fingerprint = _digest(joined, lengths, states, *named)
        store = _cache_file(source, cache)
        content = _recall(store, fingerprint)
        if not _fits(content, len(names)):
            content = {}
        manifest = cls(
            root=root,
            names=np.frombuffer(joined, np.uint8),
            offsets=np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]),
            sizes=_sizes(content, len(names)),
            labels=labels,
            classes=classes,
            fingerprint=fingerprint,
            total_bytes=int(states[:, 0].clip(0).sum()),
            _store=store,
        )
        return manifest._ready(content)

    def _ready(self, content: dict[str, np.ndarray], changed: bool = False) -> "Manifest":
        """Completes sizes and marks from what was remembered, and remembers what is new."""
        self._mark(content.get("unusable", ()))
        if self._read_missing_sizes() or changed:
            self._remember()
        if not (self.sizes > 0).any():
            where = self.root if self.shards is None else self.shards.path(0)
            raise DataError(f"none of {len(self)} images in {where} can be read; {self.complaint(0)}")
        return self

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def has_labels(self) -> bool:
        return self.labels is not None

    def path_bytes(self, index: int) -> bytes:
        """Path of one image as the file system knows it; of an image in a shard `SHARD/MEMBER`, for people."""
        index = range(len(self))[index]
        name = self.names[self.offsets[index] : self.offsets[index + 1]].tobytes()
        return os.path.join(os.fsencode(self.root), name)

    def path(self, index: int) -> str:
        """Path of one image; in a shard `SHARD/MEMBER`."""
        return os.fsdecode(self.path_bytes(index))

    def read(self, index: int) -> bytes:
        """The encoded image. Raises OSError where it cannot be read. Threads and forked processes may share it."""
        if self.index is None:
            with open(self.path_bytes(index), "rb") as file:
                return file.read()
        return self._read_shard(range(len(self))[index])

    def state(self, index: int) -> tuple[int, int]:
        """Bytes and modification time in ns, now, of an image's file or shard. Raises OSError where it is gone."""
        found = os.stat(self.path_bytes(index) if self.index is None else self.shards.path(self.index.shard[index]))
        return found.st_size, found.st_mtime_ns

    def unreadable(self) -> np.ndarray:
        """Positions (int64) of the images whose header could not be read or that were found unusable."""
        return np.flatnonzero(self.sizes[:, 0] <= 0)

    def mark_unusable(self, positions: Iterable[int]) -> None:
        """Sets sizes to -1, -1, and remembers that in the cache until the fingerprint changes."""
        self._mark(positions)
        content = _recall(self._store, self.fingerprint)
        if _fits(content, len(self)):
            self._mark(content.get("unusable", ()))  # what another process marked since
        self._remember()

    def header_sizes(self) -> np.ndarray:
        """Sizes (int32 [n, 2]) as the headers say, also of images that were found unusable."""
        sizes = self.sizes.copy()
        for position, size in self._marked.items():
            sizes[position] = size
        return sizes

    def complaint(self, index: int) -> str:
        """The path of an image and what is wrong with it now, as far as its header says."""
        if self.sizes[index, 0] < 0:
            return f"{self.path(index)}: a scan found it unusable"
        try:
            self._read_size(index)
        except OSError as error:
            return f"{self.path(index)}: {reason(error)}"
        return f"{self.path(index)}: it has changed since it was listed"

    def _read_shard(self, index: int, most: int | None = None) -> bytes:
        length = int(self.index.length[index])
        return self.shards.read(
            int(self.index.shard[index]), int(self.index.at[index]), length if most is None else min(most, length)
        )

    def _read_size(self, index: int) -> tuple[int, int]:
        if self.index is None:
            return read_size(self.path_bytes(index))
        head = self._read_shard(index, _HEAD)
        with contextlib.suppress(OSError):
            return size_in(io.BytesIO(head))
        return size_in(io.BytesIO(self._read_shard(index)))

    def _read_missing_sizes(self) -> int:
        """Reads the headers of images without a size; the number of sizes that were found."""
        missing = np.flatnonzero(self.sizes[:, 0] == 0)

        def read(start: int) -> None:
            for index in missing[start : start + _CHUNK].tolist():
                with contextlib.suppress(OSError):
                    self.sizes[index] = self._read_size(index)

        _spread(read, range(0, len(missing), _CHUNK))
        return int((self.sizes[missing, 0] > 0).sum())

    def _mark(self, positions: Iterable[int]) -> None:
        for position in positions:
            position = range(len(self))[position]
            self._marked.setdefault(position, tuple(self.sizes[position].tolist()))
            self.sizes[position] = -1

    def _remember(self) -> None:
        arrays = {} if self.index is None else vars(self.index)
        _write_cache(
            self._store,
            fingerprint=self.fingerprint,
            sizes=self.header_sizes(),
            unusable=np.array(sorted(self._marked), np.int64),
            **arrays,
        )


def _spread(function: Callable[[Any], Any], tasks: Sequence[Any]) -> list[Any]:
    """Results of a function in order; in threads as soon as it mostly waits.

    Local storage answers in microseconds, and threads would only contend for the interpreter; network storage does not.
    """
    results = []
    start, busy = time.perf_counter(), time.thread_time()
    for number, task in enumerate(tasks, 1):
        results.append(function(task))
        passed = time.perf_counter() - start
        if passed > 0.05 and time.thread_time() - busy < passed / 2:
            with ThreadPoolExecutor(_THREADS) as pool:
                return results + list(pool.map(function, tasks[number:]))
    return results


def _states(root: str, names: list[bytes]) -> np.ndarray:
    """Bytes and modification times in ns, int64 [n, 2], of files; -1, -1 where there is none."""
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY)  # shorter walks through the file system

    def look(start: int) -> np.ndarray:
        found = []
        for name in names[start : start + _CHUNK]:
            try:
                state = os.stat(name, dir_fd=folder)
            except (OSError, ValueError):
                found += (-1, -1)
            else:
                found += (-1, -1) if stat.S_ISDIR(state.st_mode) else (state.st_size, state.st_mtime_ns)
        return np.array(found, np.int64)

    try:
        return np.concatenate(_spread(look, range(0, len(names), _CHUNK))).reshape(-1, 2)
    finally:
        os.close(folder)


# Folders.


def _list_tree(root: str) -> tuple[list[str], list[int], list[bytes]]:
    """Class names (none for a flat folder), images of each, and all names, class by class."""
    base = os.fsencode(root)
    folders, flat, others = _scan(base, b"")
    folders.sort()
    trees = _spread(lambda folder: _list_class(base, folder), folders)
    found = [(folder, names) for folder, (names, _) in zip(folders, trees, strict=True) if names]
    if found and flat:
        warnings.warn(
            f"{len(flat)} images lie directly in {root} beside its class folders; they are not used", stacklevel=3
        )
    if not found and not flat:
        raise DataError(_no_image(root, sum((counts for _, counts in trees), others)))
    if not found:
        return [], [], flat
    classes = [os.fsdecode(folder) for folder, _ in found]
    return classes, [len(names) for _, names in found], [name for _, names in found for name in names]


def _list_class(base: bytes, folder: bytes) -> tuple[list[bytes], Counter[str]]:
    """All images under one class folder, at any depth, sorted by folder and name; and its other files by kind."""
    waiting, done, seen, others = [folder], {}, set(), Counter()
    while waiting:
        here = waiting.pop()
        try:
            state = os.stat(os.path.join(base, here))
        except OSError as error:
            raise DataError(_unreadable(os.fsdecode(os.path.join(base, here)), error)) from error
        if (state.st_dev, state.st_ino) in seen:  # a link that leads back up
            continue
        seen.add((state.st_dev, state.st_ino))
        inner, done[here], kinds = _scan(base, here)
        others += kinds
        waiting += [os.path.join(here, name) for name in inner]
    return [name for here in sorted(done) for name in done[here]], others


def _scan(base: bytes, folder: bytes) -> tuple[list[bytes], list[bytes], Counter[str]]:
    """Sub-folders and images of one folder, the images sorted, and its other files by kind."""
    folders, images, others = [], [], Counter()
    path = os.path.join(base, folder) if folder else base
    prefix = os.path.join(folder, b"")
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                name = entry.name
                if name.startswith(b"."):
                    continue
                if _is_folder(entry):
                    folders.append(name)
                elif name.lower().endswith(ENDINGS):
                    images.append(prefix + name)
                else:
                    others[os.path.splitext(os.fsdecode(name))[1]] += 1
    except OSError as error:
        raise DataError(_unreadable(os.fsdecode(path), error)) from error
    images.sort()
    return folders, images, others


def _is_folder(entry: os.DirEntry) -> bool:
    """Whether an entry is a folder or a link to one. Raises OSError where that is unknown and it may be one."""
    try:
        return entry.is_dir()
    except OSError as error:
        if error.errno != errno.ELOOP and not entry.name.lower().endswith(ENDINGS):
            raise
        return False


def _holds_images(root: str) -> bool:
    """Whether there is an image in a folder, at any depth."""
    for _, folders, files in os.walk(os.fsencode(root), followlinks=False):
        folders[:] = [name for name in folders if not name.startswith(b".")]
        if any(name.lower().endswith(ENDINGS) and not name.startswith(b".") for name in files):
            return True
    return False


def _no_image(root: str, others: Counter[str]) -> str:
    wanted = f"it must hold {', '.join(EXTENSIONS)} files, or one folder of them per class, or .tar shards"
    if not others:
        return f"{root} holds no files; {wanted}"
    kinds = ", ".join(kind or "no extension" for kind, _ in others.most_common(3))
    return f"{root} holds no images, only {others.total()} other files ({kinds}); {wanted}"


def _unreadable(folder: str, error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return f"{folder} does not exist; give a folder of images, or one with a folder of images per class"
    if isinstance(error, NotADirectoryError):
        return f"{folder} is a file, not a folder; give the folder that holds the images, or open it with Manifest.open"
    return f"{folder} cannot be listed: {reason(error)}; check its permissions"


# Lists.


def _lines(source: str) -> list[tuple[int, bytes]]:
    """Lines of a list that name an image, with their numbers from 1."""
    try:
        with open(source, "rb") as file:
            content = file.read().removeprefix(b"\xef\xbb\xbf")
    except OSError as error:
        raise DataError(f"{source} cannot be read: {reason(error)}; check the path and its permissions") from error
    if b"\0" in content:
        raise DataError(f"{source}: not a text file in UTF-8; a list has the path of an image per line")
    lines = [
        (number, text)
        for number, line in enumerate(content.split(b"\n"), 1)
        if (text := line.strip(b" \r")) and not text.startswith(b"#") and not text.isspace()
    ]
    if not lines:
        raise DataError(f"{source}: names no image; a list has the path of an image per line")
    return lines


def _split_lines(source: str, lines: list[tuple[int, bytes]]) -> tuple[list[bytes], list[bytes]]:
    """Names and the texts of their labels (none without labels)."""
    rows = [text.split(b"\t") for _, text in lines]
    if all(len(row) == 1 for row in rows):
        spaced = [re.fullmatch(rb"(.*\S) (\d+)", text) for _, text in lines]
        if all(spaced):
            return [match[1] for match in spaced], [match[2] for match in spaced]
        typical = [bool(match) and match[1].lower().endswith(ENDINGS) for match in spaced]
        if any(typical):
            raise DataError(_mixed(source, lines, typical, "a blank and an integer"))
        return [row[0] for row in rows], []
    for (number, _), row in zip(lines, rows, strict=True):
        if len(row) > 2 or not all(part.strip() for part in row):
            raise DataError(f"{source}, line {number}: unreadable; a line is PATH, or PATH, one TAB and a label")
    if not all(len(row) == 2 for row in rows):
        raise DataError(_mixed(source, lines, [len(row) == 2 for row in rows], "a TAB and a label"))
    return [row[0].strip() for row in rows], [row[1].strip() for row in rows]


def _mixed(source: str, lines: list[tuple[int, bytes]], labelled: list[bool], form: str) -> str:
    return (
        f"{source}, line {lines[labelled.index(False)][0]}: has no label ({form}), but {sum(labelled)} of {len(lines)} "
        "lines have one; give all lines one, or none"
    )


def _number(texts: list[bytes], place: Callable[[int], str]) -> tuple[np.ndarray | None, list[str]]:
    """Labels as positions in the classes, int64 [n], and the classes; None and nothing without labels.

    Args:
        texts: of the labels: all integers, which are the positions, or names, which are sorted.
        place: says where the label of an image stands.
    """
    if not texts:
        return None, []
    kinds: dict[bytes, int] = {}
    ids = np.fromiter((kinds.setdefault(text, len(kinds)) for text in texts), np.int64, len(texts))
    if not all(re.fullmatch(rb"-?\d+", kind) for kind in kinds):
        names = sorted(kinds)
        position = {name: number for number, name in enumerate(names)}
        return np.array([position[kind] for kind in kinds], np.int64)[ids], [os.fsdecode(name) for name in names]
    numbers = []
    for text, kind in kinds.items():
        digits = text.lstrip(b"0") or b"0"
        # By length first, for int() refuses thousands of digits.
        if len(digits) > len(str(_LARGEST_LABEL)) or not 0 <= int(digits) <= _LARGEST_LABEL:
            where = place(int(np.argmax(ids == kind)))
            label = text.decode() if len(text) <= _SHOWN else f"{text[:_SHOWN].decode()}..."
            raise DataError(f"{where}: label {label} is out of range; integers are to lie in 0 to {_LARGEST_LABEL}")
        numbers.append(int(digits))
    return np.array(numbers, np.int64)[ids], [str(number) for number in range(max(numbers) + 1)]


# Shards.


def _walk(source: str, shards: Shards) -> Index:
    """The index of some shards, from their headers."""
    found = tar_shards.walk(shards)
    names = [os.fsencode(tar) + b"/" + name for tar, one in zip(shards.tars, found, strict=True) for name in one.names]
    texts = [text for one in found for text in one.labels]

    def place(image: int) -> str:
        return os.fsdecode(os.path.join(os.fsencode(shards.root), names[image]))

    labels, classes = _number(texts, place)
    given = shards.classes()
    if labels is not None and given is not None:
        if labels.max() >= len(given):
            worst = int(labels.argmax())
            raise DataError(
                f"{place(worst)}: label {labels[worst]}, but {tar_shards.CLASSES} beside the shards names {len(given)} "
                "classes; add the others"
            )
        classes = given
    counts = [len(one.names) for one in found]
    return Index(
        names=np.frombuffer(b"".join(names), np.uint8),
        offsets=np.concatenate([[0], np.cumsum(np.fromiter(map(len, names), np.int64, len(names)))]),
        shard=np.repeat(np.arange(len(found), dtype=np.int32), counts),
        at=np.concatenate([np.array(one.at, np.int64) for one in found]),
        length=np.concatenate([np.array(one.length, np.int64) for one in found]),
        labels=np.zeros(0, np.int64) if labels is None else labels,
        classes=np.array(classes, np.str_),
    )


def _index(content: dict[str, np.ndarray], shards: Shards) -> Index | None:
    """The index that was remembered, if it was and is possible, as is what else was."""
    with contextlib.suppress(KeyError, SystemError):
        index = Index(**{key: content[key] for key in Index.__dataclass_fields__})
        if index.fits(shards) and _fits(content, len(index.shard)):
            index.classes.tolist()  # raises SystemError for what is no character
            return index
    return None


# The cache.


def _digest(*parts: Any) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _cache_file(source: str, cache: str | os.PathLike | None) -> Path | None:
    try:
        folder = Path(cache or os.environ.get("UNIGRAD_CACHE") or Path.home() / ".cache" / "unigrad-fast")
    except RuntimeError:  # a user without a home folder
        return None
    return folder / f"manifest-{hashlib.blake2b(os.fsencode(source), digest_size=8).hexdigest()}.npz"


def _recall(store: Path | None, fingerprint: str) -> dict[str, np.ndarray]:
    """Arrays in the cache; none where it has none for this fingerprint, or is damaged."""
    with contextlib.suppress(*tar_shards.DAMAGED):
        if store is not None:
            content = tar_shards.read_arrays(store)
            if content["fingerprint"].tolist() == fingerprint:
                return content
    return {}


def _fits(content: dict[str, np.ndarray], count: int) -> bool:
    """Whether sizes and marks, where these were remembered, are possible for so many images."""
    sizes, unusable = _sizes(content, count), content.get("unusable", np.zeros(0, np.int64))
    return (
        sizes.dtype == np.int32
        and sizes.shape == (count, 2)
        and bool((sizes >= 0).all())
        and unusable.dtype == np.int64
        and unusable.ndim == 1
        and tar_shards.within(unusable, count)
    )


def _sizes(content: dict[str, np.ndarray], count: int) -> np.ndarray:
    """Sizes that were remembered, else zeros."""
    return content["sizes"] if "sizes" in content else np.zeros((count, 2), np.int32)


def _write_cache(store: Path | None, **arrays: Any) -> None:
    if store is None:
        return
    with contextlib.suppress(OSError):
        store.parent.mkdir(parents=True, exist_ok=True)
        # Several ranks may write at once: each its own draft, and the last one in place stays.
        with tempfile.NamedTemporaryFile(dir=store.parent, prefix=f".{store.name}.", delete=False) as draft:
            try:
                np.savez(draft, **arrays)
                draft.flush()
                os.replace(draft.name, store)
            except OSError:
                os.unlink(draft.name)
