"""Tar shards in the layout of WebDataset: where each image lies in them, and reading it from there.

The headers are walked once. Afterwards an image is read by its offset, so that any order of images costs the same
and needs no unpacking. A sample is an image and what has the same key, the name up to the first dot behind the last
slash: `a/7.jpg`, `a/7.cls` (an integer), `a/7.json` (with the key `label` or `cls`).
"""

import errno
import json
import lzma
import os
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np

from .errors import DataError
from .headers import ENDINGS, EXTENSIONS, reason

ENDING = ".tar"
INDEX = "index.npz"  # beside the shards: what `Index` holds, and more
CLASSES = "classes.txt"  # beside the shards: a class name per line, in the order of the integer labels
UNFINISHED = ".unfinished"  # folder beside shards that are still being written
BLOCK = 512
_FILES, _LINKS = b"\x0007", b"12"  # types of tar members
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")
_OPEN = 256  # shards kept open; the usual limit is 1,024 files per process
_PIECE = 1 << 20  # bytes that are read at once between archives
# What numpy and zipfile raise for an .npz file that is absent, cut off, overwritten or something else.
DAMAGED = (
    *(OSError, EOFError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError, SyntaxError),
    *(NotImplementedError, RuntimeError, MemoryError, SystemError),
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error, tokenize.TokenError),
)
_DTYPES = {
    "names": np.uint8,
    "offsets": np.int64,
    "shard": np.int32,
    "at": np.int64,
    "length": np.int64,
    "labels": np.int64,
}
_THREADS = 8  # hides the latency of network storage


@dataclass(frozen=True, eq=False)
class Shards:
    """Shards at one path, and whether they are still what they were.

    Attributes:
        root: the folder that holds them.
        files: their names, sorted, and behind them `classes.txt` where there is one.
        states: int64 [files, 2], bytes and modification time in ns.
    """

    root: str
    files: list[str]
    states: np.ndarray = field(repr=False)

    @classmethod
    def find(cls, path: str) -> "Shards":
        """The shards of a folder, or the one shard at a path. Raises DataError where that is not possible."""
        if os.path.isdir(path):
            root, files = path, tar_files(path)
            if os.path.exists(os.path.join(root, UNFINISHED)):
                raise DataError(f"{root}: its shards are unfinished; type the `data shard` command that began it again")
        else:
            root, files = os.path.split(path)
            files = [files]
        if os.path.exists(os.path.join(root, CLASSES)):
            files.append(CLASSES)
        states = []
        for name in files:
            try:
                found = os.stat(os.path.join(root, name))
            except OSError as error:
                raise DataError(f"{os.path.join(root, name)}: {reason(error)}; correct the path") from error
            states.append((found.st_size, found.st_mtime_ns))
        return cls(root, files, np.array(states, np.int64))

    @property
    def tars(self) -> list[str]:
        return [name for name in self.files if name != CLASSES]

    def path(self, shard: int) -> str:
        return os.path.join(self.root, self.files[shard])

    def read(self, shard: int, at: int, length: int) -> bytes:
        """Bytes of a shard. Raises OSError where it is gone, has changed or ends early."""
        shard_file = _opened(self.path(shard), *self.states[shard].tolist())
        return _pread(shard_file, at, length)

    def classes(self) -> list[str] | None:
        """The class names beside the shards, or None."""
        if CLASSES not in self.files:
            return None
        path = os.path.join(self.root, CLASSES)
        try:
            with open(path, encoding="utf-8", errors="surrogateescape", newline="\n") as file:
                return file.read().removesuffix("\n").split("\n")
        except OSError as error:
            raise DataError(f"{path} cannot be read: {reason(error)}; check its permissions") from error


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


def within(positions: np.ndarray, count: int) -> bool:
    """Whether all integers are positions among so many."""
    return not positions.size or bool(positions.min() >= 0 and positions.max() < count)


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """All arrays of an .npz file. Raises one of `DAMAGED` where it is absent or damaged."""
    with np.load(path) as content:
        return {key: np.asarray(content[key]) for key in content.files}  # numpy hands out foreign members as bytes


def tar_files(folder: str) -> list[str]:
    """Names of the tar files directly in a folder, sorted. Raises DataError where it cannot be listed."""
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries if entry.name.endswith(ENDING) and entry.is_file()]
    except OSError as error:
        raise DataError(f"{folder} cannot be listed: {reason(error)}; check its permissions") from error
    return sorted((name for name in names if not name.startswith(".")), key=os.fsencode)


def load(path: Path, shards: Shards) -> dict[str, np.ndarray] | None:
    """Arrays of the index beside the shards; None where there is none, or it is damaged or belongs to others.

    Modification times are not compared, for a copy on another machine may have others.
    """
    with suppress(*DAMAGED):
        arrays = read_arrays(path)
        if arrays["files"].tolist() == shards.files and np.array_equal(arrays["bytes"], shards.states[:, 0]):
            return arrays
    return None


@dataclass
class Found:
    """Images of one shard: names, where they start, their lengths in bytes and the texts of their labels."""

    names: list[bytes] = field(default_factory=list)
    at: list[int] = field(default_factory=list)
    length: list[int] = field(default_factory=list)
    labels: list[bytes] = field(default_factory=list)


def walk(shards: Shards) -> list[Found]:
    """Images of every shard, from the tar headers.

    Where nothing is labelled and the images lie in several folders, these are the classes, as in a tar of a tree.

    Raises:
        DataError: a shard is compressed, cut off or damaged, has two images of one key or none at all, or only some
            images have labels.
    """
    paths = [shards.path(number) for number in range(len(shards.tars))]
    with ThreadPoolExecutor(_THREADS) as pool:
        found = list(pool.map(_walk_shard, paths))
    for path, one in zip(paths, found, strict=True):
        if bool(one.labels) != bool(found[0].labels):
            which, other = (path, paths[0]) if not one.labels else (paths[0], path)
            raise DataError(f"{which}: its images have no labels, those of {other} have; give all of them one, or none")
    if not found[0].labels:
        folders = [[name.rpartition(b"/")[0].rpartition(b"/")[2] for name in one.names] for one in found]
        if len(distinct := {folder for names in folders for folder in names}) > 1 and b"" not in distinct:
            for one, names in zip(found, folders, strict=True):
                one.labels = names
    return found


def missing(path: Path, shards: Shards) -> list[str]:
    """Files that the index beside the shards lists and that are not there."""
    with suppress(*DAMAGED), np.load(path) as content:
        if content["files"].dtype.kind == "U":
            return sorted(set(content["files"].tolist()) - set(shards.files))
    return []


def _walk_shard(path: str) -> Found:
    found = Found()
    keys: list[bytes] = []
    labels: dict[bytes, dict[bytes, bytes]] = {b"cls": {}, b"json": {}}
    dotted, seen = [], set()
    for name, at, length, link, content in _members(path):
        folder, slash, base = name.rpartition(b"/")
        stem, dot, ending = base.partition(b".")
        if not stem or not dot:  # hidden, or without an ending
            continue
        key, ending = folder + slash + stem, ending.lower()
        is_image = b"." + ending in ENDINGS
        if not is_image and ending not in labels:
            if ending.endswith(ENDINGS):
                dotted.append(name)
            continue
        if link:
            raise DataError(f"{_member(path, name)}: a link; pack it with `tar --dereference --hard-dereference`")
        mark = (key, b"" if is_image else ending)
        if mark in seen:
            what = "image" if is_image else f".{ending.decode()} file"
            raise DataError(f"{_member(path, name)}: the second {what} of the key {_text(key)}; rename one of them")
        seen.add(mark)
        if is_image:
            keys.append(key)
            found.names.append(name)
            found.at.append(at)
            found.length.append(length)
        elif (label := _label(ending, content(), path, name)) is not None:
            labels[ending][key] = label
    if not found.names:
        why = f"; {_text(dotted[0])} has more than one dot, which WebDataset takes for another kind" if dotted else ""
        raise DataError(f"{path}: holds no images ({', '.join(EXTENSIONS)}){why}; leave it out, or pack it anew")
    texts = {**labels[b"json"], **labels[b"cls"]}
    found.labels = [texts[key] for key in keys if key in texts]
    if found.labels and len(found.labels) < len(keys):
        bare = next(name for name, key in zip(found.names, keys, strict=True) if key not in texts)
        count = f"{len(found.labels)} of {len(keys)} images have a label"
        raise DataError(f"{_member(path, bare)}: no label (.cls or .json), but {count}; give all of them one, or none")
    return found


def _label(ending: bytes, content: bytes, path: str, name: bytes) -> bytes | None:
    """Text of a label; None for a .json file without one."""
    if ending == b"cls":
        label = content.strip()
        if not label.isdigit():
            said = _text(label[:20]) or "nothing"
            raise DataError(f"{_member(path, name)}: says {said}; a .cls file is to hold an integer from 0")
        return label
    try:
        tree = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{_member(path, name)}: not valid JSON ({error}); repair or remove it") from error
    value = next((tree[key] for key in ("label", "cls") if key in tree), None) if isinstance(tree, dict) else None
    if value is None:
        return None
    if isinstance(value, (int, str)) and not isinstance(value, bool) and (text := str(value).strip()):
        with suppress(UnicodeEncodeError):  # JSON can write half a character
            return text.encode("utf-8", "surrogateescape")
    raise DataError(f"{_member(path, name)}: its label is {value!r}; it is to be an integer or a name")


def _members(path: str) -> Iterator[tuple]:
    """Name, start, length, whether it is a link, and a function that reads it, of every file in a tar.

    Archives that were joined with `cat` are read one after the other; what else follows an end mark is ignored.
    """
    try:
        file = _File(path)
        total = os.fstat(file.number).st_size
    except OSError as error:
        raise DataError(f"{path} cannot be read: {reason(error)}; check its permissions") from error
    position, long_name, long_length = 0, None, None
    ended = False  # whether an end mark lies before this position
    while True:
        try:
            header = os.pread(file.number, 2 * BLOCK, position)  # with the label that may follow it
            if len(header) >= BLOCK and not any(header[:BLOCK]):  # the end mark
                position, long_name, long_length, ended = _behind_zeros(file, position), None, None, True
                header = os.pread(file.number, 2 * BLOCK, position)
        except OSError as error:
            raise DataError(f"{path} cannot be read: {reason(error)}") from error
        header, behind = header[:BLOCK], header[BLOCK:]
        if position == 0 and header.startswith(_COMPRESSED):
            raise DataError(f"{path}: compressed; unpack it (gunzip, unxz, unzstd): images are read by offset")
        if len(header) < BLOCK:
            if ended:
                return
            raise DataError(f"{path}: cut off after {total} bytes; copy or pack it again")
        try:
            intact = sum(header) - sum(header[148:156]) + 8 * 32 == int(header[148:156].strip(b" \0"), 8)
            length = _number(header[124:136])
        except ValueError:
            intact = False
        if ended and not intact:
            return
        if not intact:
            what = f"its header at byte {position} is damaged" if position else "not a tar file"
            raise DataError(f"{path}: {what}; copy or pack it again")
        ended = False
        kind, at = header[156:157], position + BLOCK
        if kind not in b"xgLK" and long_length is not None:
            length = long_length
        stored = 0 if kind in _LINKS else length
        position = at + -(-stored // BLOCK) * BLOCK
        if at + stored > total:
            raise DataError(f"{path}: cut off after {total} bytes; copy or pack it again")

        def content(at: int = at, length: int = stored, behind: bytes = behind) -> bytes:
            return behind[:length] if length <= len(behind) else _pread(file, at, length)

        if kind == b"L":
            long_name = content().rstrip(b"\0")
        elif kind == b"x":
            try:
                records = _pax(content())
                long_length = _decimal(records[b"size"]) if b"size" in records else None
            except ValueError as error:
                what = f"{_member(path, _short_name(header))}: an extended header at byte {at} that is damaged"
                raise DataError(f"{what}; copy or pack the shard again") from error
            long_name = records.get(b"path", long_name)
            if any(key.startswith(b"GNU.sparse") for key in records):
                raise DataError(f"{path}: stored sparsely at byte {at}; pack it without `--sparse`")
        elif kind not in b"gK":
            name = long_name if long_name is not None else _short_name(header)
            if kind == b"S":
                raise DataError(f"{_member(path, name)}: stored sparsely; pack it without `--sparse`")
            long_name = long_length = None
            if kind in _FILES + _LINKS and not name.endswith(b"/"):  # old tars write folders so
                yield name.removeprefix(b"./").lstrip(b"/"), at, stored, kind in _LINKS, content


def _number(text: bytes) -> int:
    """A number of a tar header: octal digits, or GNU's binary form for sizes from 8 GiB."""
    if text[0] == 0x80:
        return int.from_bytes(text[1:], "big")
    number = int(text.strip(b" \0") or b"0", 8)
    if number < 0:
        raise ValueError
    return number


def _decimal(text: bytes) -> int:
    if not text.isdigit():
        raise ValueError
    return int(text)


def _behind_zeros(file: "_File", position: int) -> int:
    """Where the first block from there begins that is not all zeros, or the end of the file."""
    while piece := os.pread(file.number, _PIECE, position):
        if rest := piece.lstrip(b"\0"):
            return (position + len(piece) - len(rest)) // BLOCK * BLOCK
        position += len(piece)
    return position


def _short_name(header: bytes) -> bytes:
    name, prefix = header[:100].partition(b"\0")[0], header[345:500].partition(b"\0")[0]
    return prefix + b"/" + name if prefix and header[257:263] == b"ustar\0" else name


def _pax(content: bytes) -> dict[bytes, bytes]:
    """Records `LENGTH KEY=VALUE\\n` of an extended header. Raises ValueError where it is damaged."""
    records, start = {}, 0
    while start < len(content):
        space = content.index(b" ", start)
        end = start + _decimal(content[start:space])
        key, equals, value = content[space + 1 : end - 1].partition(b"=")
        if not equals or content[end - 1 : end] != b"\n" or (key == b"path" and b"\0" in value):
            raise ValueError
        records[key] = value
        start = end
    return records


def _member(path: str, name: bytes) -> str:
    return os.path.join(path, _text(name))


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


class _File:
    """An open file that is closed when nobody needs it any more, in whatever thread that is."""

    def __init__(self, path: str) -> None:
        self.path, self.number = path, -1
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if self.number >= 0:
            os.close(self.number)


# pread has no position that threads or forked processes could move for one another.
@lru_cache(_OPEN)
def _opened(path: str, size: int, changed: int) -> _File:
    file = _File(path)
    found = os.fstat(file.number)
    if (found.st_size, found.st_mtime_ns) != (size, changed):
        raise OSError(errno.ESTALE, "It has changed since it was listed", path)
    return file


def _pread(file: _File, at: int, length: int) -> bytes:
    parts, missing = [], length
    while missing:
        part = os.pread(file.number, missing, at + length - missing)
        if not part:
            raise OSError(errno.EIO, "It ends early", file.path)
        parts.append(part)
        missing -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)
