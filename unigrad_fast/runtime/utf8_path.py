"""Opens files whose names are not UTF-8 with libraries that accept only UTF-8 names."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
