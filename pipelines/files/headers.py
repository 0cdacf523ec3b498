"""Image files by name and header: what counts as an image, and its width and height."""

import errno
import io
import os
import stat
import struct
from contextlib import suppress

from PIL import Image, UnidentifiedImageError

# The formats of torchvision's ImageFolder, by extension; DALI decodes all of them.
FORMAT_OF = {".jpg": "JPEG", ".jpeg": "JPEG", ".png": "PNG", ".ppm": "PPM", ".bmp": "BMP"}
FORMAT_OF |= {".pgm": "PPM", ".tif": "TIFF", ".tiff": "TIFF", ".webp": "WEBP"}
EXTENSIONS = tuple(FORMAT_OF)
ENDINGS = tuple(extension.encode() for extension in EXTENSIONS)
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "PPM", "TIFF")
_ORIENTATION, _WIDTH, _HEIGHT = 0x112, 0x100, 0x101  # tags of TIFF files
_INTEGERS = {3: "H", 4: "I", 16: "Q"}  # types of their values


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
    except Image.DecompressionBombError as error:
        raise UnidentifiedImageError(str(error)) from error
    except (OSError, SyntaxError, ValueError) as error:
        # Training decodes kinds that Pillow does not know, and files whose metadata it refuses.
        with suppress(struct.error, LookupError, ValueError, OverflowError):
            _, size = declared(file)
            if min(size) > 0 and size[0] * size[1] <= 2 * Image.MAX_IMAGE_PIXELS:  # as Pillow requires
                return size
        if isinstance(error, OSError):
            raise
        raise UnidentifiedImageError(str(error)) from error


def declared(file: io.BufferedIOBase) -> tuple[str, tuple[int, int]]:
    """Pillow's name of the format, and width and height, by the fewest bytes that tell them.

    Raises struct.error, LookupError, ValueError or OverflowError for anything else.
    """
    file.seek(0)
    head = file.read(26)
    if head.startswith(b"\x89PNG\r\n\x1a\n") and head[12:16] == b"IHDR":
        return "PNG", struct.unpack(">II", head[16:24])
    if head[:2] in (b"II", b"MM"):
        return "TIFF", _size_in_tiff(file, head)
    if head.startswith(b"BM"):
        width, height = struct.unpack_from("<ii" if head[14] >= 40 else "<hh", head, 18)
        return "BMP", (width, abs(height))
    if head.startswith(b"\xff\xd8"):
        return "JPEG", _size_in_jpeg(file)
    raise ValueError


def _size_in_tiff(file: io.BufferedIOBase, head: bytes) -> tuple[int, int]:
    order = "<" if head.startswith(b"II") else ">"
    is_big = struct.unpack(order + "H", head[2:4]) == (43,)
    number, count, length = (order + "Q", order + "Q", 20) if is_big else (order + "I", order + "H", 12)
    (start,) = struct.unpack_from(number, head, 8 if is_big else 4)
    file.seek(start)
    (entries,) = struct.unpack(count, file.read(struct.calcsize(count)))
    found = {}
    for _ in range(min(entries, 1 << 12)):
        entry = file.read(length)
        tag, kind = struct.unpack_from(order + "HH", entry)
        if tag in (_WIDTH, _HEIGHT):
            (found[tag],) = struct.unpack_from(order + _INTEGERS[kind], entry, length - struct.calcsize(number))
    return found[_WIDTH], found[_HEIGHT]


def _size_in_jpeg(file: io.BufferedIOBase) -> tuple[int, int]:
    file.seek(2)
    while file.read(1) == b"\xff":
        mark = b"\xff"
        while mark == b"\xff":
            mark = file.read(1)
        length, _, height, width = struct.unpack(">HBHH", file.read(7))
        if mark[0] in range(0xC0, 0xD0) and mark[0] not in (0xC4, 0xC8, 0xCC):  # the start of a frame
            return width, height
        if length < 2:
            break
        file.seek(length - 7, os.SEEK_CUR)
    raise ValueError


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
