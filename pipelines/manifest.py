"""Which images a folder holds: names, sizes, labels and a fingerprint, compact enough for millions of files.

Names are relative to the root and lie end to end in one array of bytes; a million files take about 60 MB.
"""

import contextlib
import hashlib
import os
import tempfile
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

from .errors import DataError

EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
_ENDINGS = tuple(extension.encode() for extension in EXTENSIONS)
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP")
_THREADS = 8  # hides the latency of network storage
_CHUNK = 2048  # files per task of the header scan


@dataclass(frozen=True, eq=False)
class Manifest:
    """The images of a folder, sorted by class and name.

    Attributes:
        root: the folder.
        names: uint8, every name relative to the root, end to end.
        offsets: int64 [n + 1], where each name starts in `names`.
        sizes: int32 [n, 2], width and height as the file's header says; 0, 0 where it cannot be read.
        labels: int64 [n] positions in `classes`, or None for a folder without class folders.
        classes: names of the class folders, sorted.
        fingerprint: hex digest of all names, file sizes and modification times.
    """

    root: str
    names: np.ndarray = field(repr=False)
    offsets: np.ndarray = field(repr=False)
    sizes: np.ndarray = field(repr=False)
    labels: np.ndarray | None = field(repr=False)
    classes: list[str] = field(repr=False)
    fingerprint: str

    @classmethod
    def from_folder(cls, path: str | os.PathLike, cache: str | os.PathLike | None = None) -> "Manifest":
        """Reads an ImageFolder tree (`CLASS/**/*.jpg`), or a flat folder of images, which has no labels.

        Hidden files and folders are ignored, and so is a class folder without an image. Image sizes come
        from the headers alone and are remembered in the cache until a name, size or modification time
        changes.

        Args:
            path: the folder.
            cache: folder of remembered sizes; None for `$UNIGRAD_CACHE`, or `~/.cache/unigrad-fast`. One
                that cannot be written is not an error.

        Raises:
            DataError: the folder is missing, unreadable or holds no image that can be read.
        """
        root = os.path.abspath(os.fspath(path))
        classes, listing = _list_tree(root)
        fingerprint = listing.fingerprint()
        store = _cache_file(root, cache)
        manifest = cls(
            root=root,
            names=np.frombuffer(listing.names, np.uint8),
            offsets=np.concatenate([[0], np.cumsum(listing.lengths, dtype=np.int64)]),
            sizes=_remembered(store, fingerprint, len(listing.lengths)),
            labels=np.repeat(np.arange(len(classes)), listing.counts) if classes else None,
            classes=classes,
            fingerprint=fingerprint,
        )
        if manifest._read_missing_sizes():
            _remember(store, fingerprint, manifest.sizes)
        if not manifest.sizes.any():
            raise DataError(f"none of {len(manifest)} images in {root} can be read; {manifest.complaint(0)}")
        return manifest

    @classmethod
    def open(cls, path: str | os.PathLike, cache: str | os.PathLike | None = None) -> "Manifest":
        """The images of whatever lies at a path."""
        return cls.from_folder(path, cache)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def has_labels(self) -> bool:
        return self.labels is not None

    def path_bytes(self, index: int) -> bytes:
        """Path of one image as the file system knows it."""
        index = range(len(self))[index]
        name = self.names[self.offsets[index] : self.offsets[index + 1]].tobytes()
        return os.path.join(os.fsencode(self.root), name)

    def path(self, index: int) -> str:
        """Path of one image."""
        return os.fsdecode(self.path_bytes(index))

    def read(self, index: int) -> bytes:
        """The encoded image. Raises OSError where it cannot be read."""
        with open(self.path_bytes(index), "rb") as file:
            return file.read()

    def unreadable(self) -> np.ndarray:
        """Positions (int64) of the files whose header could not be read."""
        return np.flatnonzero(self.sizes[:, 0] == 0)

    def complaint(self, index: int) -> str:
        """The path of an image and what is wrong with its header now."""
        try:
            read_size(self.path_bytes(index))
        except OSError as error:
            return f"{self.path(index)}: {reason(error)}"
        return f"{self.path(index)}: it has changed since it was listed"

    def require_readable(self) -> None:
        """Raises `DataError` if the header of any file could not be read."""
        bad = self.unreadable()
        if len(bad):
            raise DataError(
                f"{len(bad)} of {len(self)} images in {self.root} cannot be read; repair or remove "
                f"{self.complaint(int(bad[0]))}"
            )

    def _read_missing_sizes(self) -> int:
        """Reads the headers of files without a size; the number of sizes that were found."""
        missing = self.unreadable()

        def read(start: int) -> None:
            for index in missing[start : start + _CHUNK].tolist():
                with contextlib.suppress(OSError):
                    self.sizes[index] = read_size(self.path_bytes(index))

        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(read, range(0, len(missing), _CHUNK)))
        return len(missing) - len(self.unreadable())


def read_size(path: bytes) -> tuple[int, int]:
    """Width and height of an image from its header. Raises OSError where there is none."""
    try:
        # Opened here because Pillow itself takes no path in bytes, and a name need not be UTF-8.
        with open(path, "rb") as file, Image.open(file, formats=_FORMATS) as image:
            return image.size
    except (SyntaxError, ValueError, Image.DecompressionBombError) as error:  # of broken headers
        raise UnidentifiedImageError(str(error)) from error


def reason(error: OSError) -> str:
    """What is wrong with a file, in a few words."""
    if isinstance(error, UnidentifiedImageError):
        return f"its header is not one of {', '.join(_FORMATS)}"
    return (error.strerror or str(error)).lower()


class _Listing:
    """Names and states of files, in the order in which they were added."""

    def __init__(self) -> None:
        self.names = bytearray()
        self.lengths = np.zeros(0, np.int32)  # of the names
        self.states = np.zeros((0, 2), np.int64)  # bytes, modification time in ns; -1: a dangling link
        self.counts: list[int] = []  # files per class
        self.others: Counter[str] = Counter()  # files that are no images, by extension

    def fingerprint(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        for part in (self.names, self.lengths, self.states):
            digest.update(part)
        return digest.hexdigest()


def _list_tree(root: str) -> tuple[list[str], _Listing]:
    """Class names (none for a flat folder) and the files, class by class."""
    base = os.fsencode(root)
    folders, flat = _scan(base, b"")
    folders.sort()
    with ThreadPoolExecutor(_THREADS) as pool:
        trees = list(pool.map(lambda folder: _list_class(base, folder), folders))
    found = [(name, tree) for name, tree in zip(folders, trees, strict=True) if len(tree.lengths)]
    if found and len(flat.lengths):
        warnings.warn(
            f"{len(flat.lengths)} images lie directly in {root} beside its class folders; they are not used",
            stacklevel=3,
        )
    listing = _join([tree for _, tree in found]) if found else flat
    if not len(listing.lengths):
        raise DataError(_no_image(root, sum((tree.others for tree in trees), flat.others)))
    return [os.fsdecode(name) for name, _ in found], listing


def _list_class(base: bytes, folder: bytes) -> _Listing:
    """All images under one class folder, at any depth, sorted by folder and name."""
    waiting, done, seen = [folder], {}, set()
    while waiting:
        here = waiting.pop()
        try:
            state = os.stat(os.path.join(base, here))
        except OSError as error:
            raise DataError(_unreadable(os.fsdecode(os.path.join(base, here)), error)) from error
        if (state.st_dev, state.st_ino) in seen:  # a link that leads back up
            continue
        seen.add((state.st_dev, state.st_ino))
        inner, done[here] = _scan(base, here)
        waiting += [os.path.join(here, name) for name in inner]
    return _join([done[name] for name in sorted(done)])


def _scan(base: bytes, folder: bytes) -> tuple[list[bytes], _Listing]:
    """Sub-folders and images of one folder."""
    folders, files, listing = [], [], _Listing()
    path = os.path.join(base, folder) if folder else base
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.name.startswith(b"."):
                    continue
                if entry.is_dir():
                    folders.append(entry.name)
                elif entry.name.lower().endswith(_ENDINGS):
                    files.append((os.path.join(folder, entry.name), *_state(entry.stat)))
                else:
                    listing.others[os.path.splitext(os.fsdecode(entry.name))[1]] += 1
    except OSError as error:
        raise DataError(_unreadable(os.fsdecode(path), error)) from error
    files.sort()
    listing.names = bytearray().join(name for name, _, _ in files)
    listing.lengths = np.fromiter((len(name) for name, _, _ in files), np.int32, len(files))
    listing.states = np.array([state for _, *state in files], np.int64).reshape(-1, 2)
    return folders, listing


def _state(look: Callable[[], os.stat_result]) -> tuple[int, int]:
    try:
        found = look()
    except FileNotFoundError:
        return -1, -1
    return found.st_size, found.st_mtime_ns


def _join(parts: list[_Listing]) -> _Listing:
    joined = _Listing()
    joined.names = bytearray().join(part.names for part in parts)
    joined.lengths = np.concatenate([part.lengths for part in parts])
    joined.states = np.concatenate([part.states for part in parts])
    joined.counts = [len(part.lengths) for part in parts]
    joined.others = sum((part.others for part in parts), Counter())
    return joined


def _no_image(root: str, others: Counter[str]) -> str:
    wanted = f"it must hold {', '.join(EXTENSIONS)} files, or one folder of them per class"
    if not others:
        return f"{root} holds no files; {wanted}"
    kinds = ", ".join(kind or "no extension" for kind, _ in others.most_common(3))
    return f"{root} holds no images, only {others.total()} other files ({kinds}); {wanted}"


def _unreadable(folder: str, error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return f"{folder} does not exist; give a folder of images, or one with a folder of images per class"
    if isinstance(error, NotADirectoryError):
        return f"{folder} is a file, not a folder; give the folder that holds the images"
    return f"{folder} cannot be listed: {reason(error)}; check its permissions"


def _cache_file(root: str, cache: str | os.PathLike | None) -> Path | None:
    try:
        folder = Path(cache or os.environ.get("UNIGRAD_CACHE") or Path.home() / ".cache" / "unigrad-fast")
    except RuntimeError:  # a user without a home folder
        return None
    return folder / f"manifest-{hashlib.blake2b(os.fsencode(root), digest_size=8).hexdigest()}.npz"


def _remembered(store: Path | None, fingerprint: str, count: int) -> np.ndarray:
    """Sizes from the cache; zeros where it has none for this fingerprint, or is damaged."""
    with contextlib.suppress(OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        if store is not None:
            with np.load(store) as content:
                if content["fingerprint"] == fingerprint and content["sizes"].shape == (count, 2):
                    return content["sizes"].astype(np.int32)
    return np.zeros((count, 2), np.int32)


def _remember(store: Path | None, fingerprint: str, sizes: np.ndarray) -> None:
    if store is None:
        return
    with contextlib.suppress(OSError):
        store.parent.mkdir(parents=True, exist_ok=True)
        # Several ranks may write at once: each its own draft, and the last one in place stays.
        with tempfile.NamedTemporaryFile(dir=store.parent, prefix=f".{store.name}.", delete=False) as draft:
            try:
                np.savez(draft, fingerprint=fingerprint, sizes=sizes)
                draft.flush()
                os.replace(draft.name, store)
            except OSError:
                os.unlink(draft.name)
