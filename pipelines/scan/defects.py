"""Finds out what is wrong with an image, or unusual about it."""

import contextlib
import io
import os
import re
from collections.abc import Iterator
from typing import Any

from PIL import Image, UnidentifiedImageError

from ..files.headers import FORMAT_OF, FORMATS, declared, size_in, stored_size
from .decoder import Decoder


def find_defect(data: bytes, facts: dict[str, Any], decoder: Decoder) -> str | None:
    """Fills in facts from the header, and notes; returns why the image cannot be used, or None if it can."""
    if not data:
        return "empty"
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError as error:
        return _header_defect(data, error)
    except (OSError, SyntaxError, ValueError) as error:
        try:
            size = size_in(io.BytesIO(data))
            if decoder.decode(data)[0] != size:
                return _header_defect(data, error)
        except (OSError, RuntimeError):
            return _header_defect(data, error)
        facts |= {"width": size[0], "height": size[1], "format": declared(io.BytesIO(data))[0], "colour": "other"}
        facts["note"] = "unusual header or pixels"
        return None
    with image:
        width, height = stored_size(image)
        facts |= {"width": width, "height": height, "format": image.format, "colour": _colour(image)}
        try:
            size, said = decoder.decode(data)
        except RuntimeError as error:
            return _body_defect(image, data, str(error))
        if size != (width, height):
            return f"damaged (decodes to {size[0]}x{size[1]}, its header says {width}x{height})"
        facts["note"] = "; ".join(_notes(image, data, facts["path"], said))
    return None


def _header_defect(data: bytes, error: Exception) -> str:
    if isinstance(error, Image.DecompressionBombError):
        return f"too large ({error})"
    if "truncated" in str(error).lower() or _cut_short(data):
        return "truncated (in its header)"
    with contextlib.suppress(Exception), Image.open(io.BytesIO(data)) as image:
        return f"unsupported format ({image.format})"
    return "not an image" if isinstance(error, UnidentifiedImageError) else f"damaged ({error})"


def _body_defect(image: Image.Image, data: bytes, said: str) -> str:
    """Why the decoder rejects an image; Pillow's message is clearer if it has one."""
    try:
        image.load()
    except Exception as error:  # of many kinds, because Pillow's readers trust the file
        if "truncated" in str(error):
            line = re.search(r"Stopped at line (\d+)/(\d+)", said)
            return "truncated" + (f" (at row {line[1]} of {line[2]})" if line else "")
        said = str(error)
    return "truncated (no end marker)" if _cut_short(data) else f"damaged ({said.strip()})"


def _cut_short(data: bytes) -> bool:
    """Whether the end marker or the length that the format requires is missing."""
    if data.startswith(b"\x89PNG"):
        return b"IEND" not in data[-64:]
    return data.startswith(b"RIFF") and len(data) < 8 + int.from_bytes(data[4:8], "little")


def _colour(image: Image.Image) -> str:
    """Pillow's name of the colour mode; YCCK for CMYK that is stored so."""
    return "YCCK" if image.mode == "CMYK" and image.info.get("adobe_transform") == 2 else image.mode


def _notes(image: Image.Image, data: bytes, path: str, said: list[str]) -> Iterator[str]:
    """What is unusual about an image that decodes."""
    extension = os.path.splitext(path)[1]
    kind = "JPEG" if image.format == "MPO" else image.format  # JPEG files with several images
    if FORMAT_OF.get(extension.lower(), kind) != kind:
        yield f"{image.format} named {extension}"
    for line in said:
        if line.startswith("Corrupt JPEG data: "):
            what = re.sub(r"^\d+ ", "", line.removeprefix("Corrupt JPEG data: "))
            yield f"damaged but decodes ({what})"
            break
    else:
        if kind == "JPEG" and data.rfind(b"\xff\xd9") < 0:
            yield "no end marker"
    if image.mode == "CMYK":
        yield _colour(image)
    # Pillow does not report it for colour PNGs.
    if data[24] == 16 if image.format == "PNG" else image.mode.startswith("I"):
        yield "16 bits per channel"
    if image.mode == "F":
        yield "floating-point values"
    # Tags and frame tables of damaged files break Pillow in many ways, and training reads neither.
    with contextlib.suppress(Exception):
        if image.getexif().get(0x0112, 1) not in (0, 1):
            yield "EXIF rotation ignored"
    with contextlib.suppress(Exception):
        if getattr(image, "n_frames", 1) > 1:
            yield "several pictures in one file"
