"""A file that is replaced as a whole or not at all, and errors that name the file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_whole(path: Path, content: bytes) -> None:
    """Write beside the final name, flush to the disk and rename: a crash or a full disk leaves the file before."""
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
        unfinished.unlink(missing_ok=True)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """While inside, an error of the system that names no file names this one; a full disk names none."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or os.fspath(path)
        raise
