"""Image files as their names and headers tell: what counts as one, and its width and height."""

import io
import os

from PIL import Image, UnidentifiedImageError

EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
ENDINGS = tuple(extension.encode() for extension in EXTENSIONS)
FORMATS = ("JPEG", "PNG", "WEBP", "BMP")


def read_size(path: bytes) -> tuple[int, int]:
    """Width and height of an image file from its header. Raises OSError where there is none."""
    # Opened here because Pillow itself takes no path in bytes, and a name need not be UTF-8.
    # Without waiting: a pipe that somebody left there would never answer.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        return size_in(file)


def size_in(file: io.BufferedIOBase) -> tuple[int, int]:
    """Width and height of an image from its header. Raises OSError where there is none."""
    try:
        with Image.open(file, formats=FORMATS) as image:
            return image.size
    except (SyntaxError, ValueError, Image.DecompressionBombError) as error:  # of broken headers
        raise UnidentifiedImageError(str(error)) from error


def reason(error: OSError) -> str:
    """What is wrong with a file, in a few words."""
    if isinstance(error, UnidentifiedImageError):
        return f"its header is not one of {', '.join(FORMATS)}"
    return (error.strerror or str(error)).lower()
