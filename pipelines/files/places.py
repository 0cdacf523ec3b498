"""Where an encoded image is, in a form that another process can use, and its bytes."""

import os

from .headers import require_regular
from .open_files import File, opened, read_at

# A file's path; or a shard's path, size and time of change, and where in it the image starts and how long it is.
Place = bytes | tuple[str, int, int, int, int]


def find(place: Place) -> tuple[File, int, int]:
    """The open file, and where in it the encoded image starts and how long it is. Raises OSError as `read_place`."""
    if not isinstance(place, bytes):
        path, size, changed, at, length = place
        return opened(path, size, changed), at, length
    file = File(place)
    state = os.fstat(file.number)
    require_regular(place, state)
    return file, 0, state.st_size


def read_place(place: Place) -> bytes:
    """The encoded image. Raises OSError if it is gone or cannot be read, or its shard has changed."""
    return read_at(*find(place))
