"""Files whose names are no UTF-8, for libraries that open no others."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def utf8_path(path: Path) -> Iterator[str]:
    """A name in UTF-8 of a file or folder that exists: its own, or one that holds as long as this context.

    Raises:
        OSError: it needs another name and cannot be opened.
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
