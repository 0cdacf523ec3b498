"""Files that stay open and are read by offset, from any thread or forked process."""

import errno
import os
import resource
from collections.abc import Callable
from functools import lru_cache

# Files kept open; the usual limit is 1,024 per process.
_LIMIT, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
_OPEN = 256 if _LIMIT == resource.RLIM_INFINITY else max(8, min(256, _LIMIT // 4))


class File:
    """An open file that is closed when it is no longer referenced, in any thread."""

    def __init__(self, path: str | bytes) -> None:
        self.path, self.number = path, -1
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    # The default is needed because `os` is gone when the interpreter ends.
    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if self.number >= 0:
            close(self.number)


def time_of_change(state: os.stat_result) -> int:
    """Modification time in ns modulo 2**64, which fits int64: file systems and network shares hold times after 2262."""
    return (state.st_mtime_ns + 2**63) % 2**64 - 2**63


# pread has no file position that threads or forked processes would share.
@lru_cache(_OPEN)
def opened(path: str, size: int, changed: int) -> File:
    """An open file with this size and time of change. Raises OSError if these differ or it is gone."""
    file = File(path)
    found = os.fstat(file.number)
    if (found.st_size, time_of_change(found)) != (size, changed):
        raise OSError(errno.ESTALE, "It has changed since it was listed", path)
    return file


def read_at(file: File, at: int, length: int) -> bytes:
    """Bytes of a file. Raises OSError if it ends early."""
    parts, missing = [], length
    while missing:
        part = os.pread(file.number, missing, at + length - missing)
        if not part:
            raise OSError(errno.EIO, "It ends early", file.path)
        parts.append(part)
        missing -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def read_into(file: File, at: int, memory: memoryview) -> None:
    """Fills memory with bytes of a file. Raises OSError if it ends early."""
    while len(memory):
        count = os.preadv(file.number, [memory], at)
        if not count:
            raise OSError(errno.EIO, "It ends early", file.path)
        memory, at = memory[count:], at + count
