"""Writes files completely and durably, or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def whole(path: Path) -> Iterator[BinaryIO]:
    """A file that gets its name once it is written and flushed to the disk. Raises OSError with its name."""
    draft = path.with_name(f".{path.name}.unfinished")
    try:
        with open(draft, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # of the new name
        finally:
            os.close(folder)
    except OSError as error:
        error.filename = error.filename or os.fspath(path)  # a full disk names no file
        raise
    finally:
        draft.unlink(missing_ok=True)


def write_whole(path: Path, content: bytes | memoryview) -> None:
    with whole(path) as file:
        file.write(content)
