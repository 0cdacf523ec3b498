"""Image files by name and header: what counts as an image, and its width and height."""

import errno
import io
import os
import stat

from PIL import Image, UnidentifiedImageError

# The formats of torchvision's ImageFolder, by extension; DALI decodes all of them.
FORMAT_OF = {".jpg": "JPEG", ".jpeg": "JPEG", ".png": "PNG", ".ppm": "PPM", ".bmp": "BMP"}
FORMAT_OF |= {".pgm": "PPM", ".tif": "TIFF", ".tiff": "TIFF", ".webp": "WEBP"}
EXTENSIONS = tuple(FORMAT_OF)
ENDINGS = tuple(extension.encode() for extension in EXTENSIONS)
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "PPM", "TIFF")
_ORIENTATION, _WIDTH, _HEIGHT = 0x112, 0x100, 0x101  # tags of TIFF files


def read_size(path: bytes) -> tuple[int, int]:
    """Width and height of an image file from its header. Raises OSError if it has none."""
    # Opened here because Pillow itself takes no path in bytes, and a name need not be UTF-8.
    # Non-blocking, because opening a named pipe would wait forever.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        require_regular(path, os.fstat(file.fileno()))
        return size_in(file)


def size_in(file: io.BufferedIOBase) -> tuple[int, int]:
    """Width and height of an image from its header. Raises OSError if it has none."""
    try:
        with Image.open(file, formats=FORMATS) as image:
            return stored_size(image)
    except (SyntaxError, ValueError, Image.DecompressionBombError) as error:  # of broken headers
        raise UnidentifiedImageError(str(error)) from error


def stored_size(image: Image.Image) -> tuple[int, int]:
    """Width and height as stored, ignoring orientation tags, which Pillow applies to TIFF files."""
    if image.format == "TIFF" and image.tag_v2.get(_ORIENTATION, 1) != 1:
        return image.tag_v2[_WIDTH], image.tag_v2[_HEIGHT]
    return image.size


def require_regular(path: bytes | str, state: os.stat_result) -> None:
    """Raises OSError if a path is a named pipe or a device, which may never end."""
    mode = state.st_mode
    if stat.S_ISREG(mode) or stat.S_ISSOCK(mode) or stat.S_ISDIR(mode):  # the latter two fail when they are opened
        return
    raise OSError(errno.EINVAL, f"not a file but a {'named pipe' if stat.S_ISFIFO(mode) else 'device'}", path)


def reason(error: OSError) -> str:
    """What is wrong with a file, in a few words."""
    if isinstance(error, UnidentifiedImageError):
        return f"its header is not one of {', '.join(FORMATS)}"
    return (error.strerror or str(error)).lower()
