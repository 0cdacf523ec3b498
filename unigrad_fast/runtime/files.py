"""Files and folders: dangling links, files written as a whole, their names in errors and for libraries.

Imports nothing that may be missing.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from unigrad_fast.runtime.errors import UserError


def dangling_link(path: Path) -> str | None:
    """What is wrong with a path that is a dangling link or lies below one; None for any other path."""
    for place in (path, *path.parents):
        if os.path.exists(place):
            break
        if os.path.islink(place):
            return f"{place} is a link to {os.readlink(place)}, which does not exist; create it, or give another path"
    return None


def unwritable(folder: Path) -> str | None:
    """Why nothing can be written to a folder, which need not exist yet; None if it can be, also if its disk is full.

    This is tried: permissions say nothing about /sys and /proc, nor to root about a disk that is mounted read-only.
    """
    if problem := dangling_link(folder):
        return problem
    place = next(path for path in (folder, *folder.absolute().parents) if os.path.exists(path))
    if not os.path.isdir(place):
        return f"{place} is a file; give a folder"
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".unigrad-fast-", dir=place))
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT):  # /proc says the last
            return f"{place} is not writable ({error.strerror}); give another folder"
    return None


def require_folder(folder: Path, key: str = "output") -> None:
    """Raises UserError if nothing can be written to a folder; call before any work."""
    if problem := unwritable(folder):
        raise UserError(f"{key} = {folder}: {problem}")


def write_whole(path: Path, content: bytes) -> None:
    """Write to a temporary name, flush to disk and rename: after a crash or a full disk the old file is intact."""
    unfinished = path.with_name(f".{path.name}.unfinished-{os.getpid()}")
    try:
        with open(unfinished, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except OSError as error:
        error.filename, error.filename2 = os.fspath(path), None
        raise
    finally:
        with suppress(OSError):  # an error before it says more
            unfinished.unlink()


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Inside, an OSError without a file name, as from a full disk, gets this path."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or os.fspath(path)
        raise


@contextmanager
def utf8_path(path: Path) -> Iterator[str]:
    """A UTF-8 name of an existing file or folder: its own, or a temporary one, valid only inside this context.

    Raises:
        OSError: its own name is not UTF-8 and it cannot be opened.
    """
    name = os.fspath(path)
    try:
        name.encode()
    except UnicodeEncodeError:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield f"/proc/self/fd/{descriptor}"
        finally:
            os.close(descriptor)
    else:
        yield name
