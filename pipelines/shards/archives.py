"""Tar shards in the layout of WebDataset: finds the files, and reads single images by offset.

Images can be read in any order at the same cost, without unpacking.
"""

import hashlib
import os
import warnings
from dataclasses import dataclass, field

import numpy as np

from ..errors import DataError
from ..files.headers import reason, require_regular
from ..files.open_files import File, time_of_change
from ..files.slow_storage import spread
from ..files.tar_format import text_of
from ..listing.classes import composed

ENDING = ".tar"
COMPRESSED = (".tgz", ".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst")
CLASSES = "classes.txt"  # next to the shards: a class name per line, in the order of the integer labels
_END = 1 << 17  # bytes at either end of a shard that tell it from others: the first and last images and their labels
UNFINISHED = ".unfinished"  # folder next to shards that are still being written


@dataclass(frozen=True, eq=False)
class Shards:
    """The shards at a path, with what detects changes.

    Attributes:
        root: the folder that holds them.
        files: their names, sorted, followed by `classes.txt` if there is one.
        states: int64 [files, 2], bytes and time of change.
        ends: uint8 [files, 16], digests of the first and last bytes: another file may have the same size and time.
    """

    root: str
    files: list[str]
    states: np.ndarray = field(repr=False)
    ends: np.ndarray = field(repr=False)

    @classmethod
    def find(cls, path: str) -> "Shards":
        """The shards of a folder, or the single shard at a path. Raises DataError if there are none."""
        if os.path.isdir(path):
            root, files, packed = path, tar_files(path), tar_files(path, COMPRESSED)
            if packed:
                warnings.warn(
                    f"{root}: ignored {len(packed)} compressed archives ({packed[0]} for one); unpack them to .tar "
                    "(gunzip, bunzip2, unxz, unzstd)",
                    stacklevel=3,
                )
            if os.path.exists(os.path.join(root, UNFINISHED)):
                raise DataError(f"{root}: its shards are unfinished; repeat the `data shard` command that began them")
        else:
            root, files = os.path.split(path)
            files = [files]
        if os.path.exists(os.path.join(root, CLASSES)):
            files.append(CLASSES)
        return cls.of(root, files)

    @classmethod
    def of(cls, root: str, files: list[str]) -> "Shards":
        """Files with images that are read by offset. Raises DataError if one is gone or cannot be read."""
        return cls(root, files, _states(root, files), digests_of_ends(root, files))

    def followed_by(self, others: "Shards") -> "Shards":
        """These files and others behind them, all under this root."""
        states, ends = np.concatenate([self.states, others.states]), np.concatenate([self.ends, others.ends])
        return Shards(self.root, [*self.files, *others.files], states, ends)

    def found_again(self) -> "Shards":
        """The same shards as seen by this process, after another process has listed them.

        Raises DataError if a file is gone or differs.
        """
        states, ends = _states(self.root, self.files), digests_of_ends(self.root, self.files)
        for what, theirs, own in (("size", self.states[:, :1], states[:, :1]), ("content", self.ends, ends)):
            if len(other := np.flatnonzero((theirs != own).any(axis=1))):
                raise DataError(
                    f"{self.path(other[0])}: has another {what} here than on rank 0; give all machines the same files"
                )
        return Shards(self.root, self.files, states, ends)

    @property
    def tars(self) -> list[str]:
        return [name for name in self.files if name != CLASSES]

    def path(self, shard: int) -> str:
        return os.path.join(self.root, self.files[shard])

    def place(self, shard: int) -> tuple[str, int, int]:
        """A shard's path, size and time of change."""
        size, changed = self.states[shard].tolist()
        return self.path(shard), size, changed

    def classes(self) -> list[str] | None:
        """The class names in `classes.txt`, or None."""
        if CLASSES not in self.files:
            return None
        path = os.path.join(self.root, CLASSES)
        try:
            with open(path, "rb") as file:
                return [text_of(composed(name)) for name in file.read().removesuffix(b"\n").split(b"\n")]
        except OSError as error:
            raise DataError(f"{path} cannot be read: {reason(error)}; check its permissions") from error


def _states(root: str, files: list[str]) -> np.ndarray:
    states = []
    for name in files:
        try:
            found = os.stat(os.path.join(root, name))
            require_regular(os.path.join(root, name), found)
        except OSError as error:
            raise DataError(f"{os.path.join(root, name)}: {reason(error)}; correct the path") from error
        states.append((found.st_size, time_of_change(found)))
    return np.array(states, np.int64)


def digests_of_ends(root: str, files: list[str]) -> np.ndarray:
    """Digests of the first and last bytes of files, uint8 [files, 16]. Raises DataError if one cannot be read."""

    def look(name: str) -> bytes:
        path = os.path.join(root, name)
        found = hashlib.blake2b(digest_size=16)
        try:
            file = File(path)
            found.update(os.pread(file.number, _END, 0))
            found.update(os.pread(file.number, _END, max(0, os.fstat(file.number).st_size - _END)))
        except OSError as error:
            raise DataError(f"{path} cannot be read: {reason(error)}; check its permissions") from error
        return found.digest()

    return np.frombuffer(b"".join(spread(look, files)), np.uint8).reshape(-1, 16)


def tar_files(folder: str, endings: str | tuple[str, ...] = ENDING) -> list[str]:
    """Names of the tar files directly in a folder, sorted. Raises DataError if it cannot be listed."""
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries if entry.name.lower().endswith(endings) and entry.is_file()]
    except OSError as error:
        raise DataError(f"{folder} cannot be listed: {reason(error)}; check its permissions") from error
    return sorted((name for name in names if not name.startswith(".")), key=os.fsencode)
