"""Replaces a file as a whole or not at all, and makes errors name the file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
        unfinished.unlink(missing_ok=True)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Inside, an OSError without a file name, as from a full disk, gets this path."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or os.fspath(path)
        raise
