"""Files that cannot be decoded, and odd ones that can: makers by name, each called with the path to write.

`truncated`, `missing end marker`, `early end marker` and `flipped bits` damage the JPEG file that is there, or a
drawn one; the others write a file of their own. Names must end in `.jpg`.
"""

from __future__ import annotations

import io
import os
import stat
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image, PngImagePlugin

Make = Callable[[Path], None]


def picture(width: int = 48, height: int = 36) -> Image.Image:
    """Noise, so that every part of the file matters."""
    return Image.fromarray(np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8))


def encoded(image: Image.Image | None = None, format: str = "JPEG", **options: object) -> bytes:
    content = io.BytesIO()
    (image or picture()).save(content, format, **options)
    return content.getvalue()


def _write(path: Path, content: bytes) -> None:
    beside = path.with_name(f"{path.name}.part")
    beside.write_bytes(content)
    os.replace(beside, path)  # at once: a run may be reading it


def _writing(image: Image.Image | None = None, format: str = "JPEG", **options: object) -> Make:
    content = encoded(image, format, **options)
    return lambda path: _write(path, content)


def _damaging(damage: Callable[[bytes], bytes]) -> Make:
    return lambda path: _write(path, damage(path.read_bytes() if path.exists() else encoded()))


def _remove(path: Path) -> None:
    """A link that leads nowhere, as a file removed after it was listed."""
    path.unlink(missing_ok=True)
    path.symlink_to("removed")


def _block(path: Path) -> None:
    """A file that is there and cannot be opened, not even by root."""
    path.unlink(missing_ok=True)
    os.mknod(path, stat.S_IFSOCK | 0o600)


def _middle(content: bytes) -> int:
    """A place among the coded pixels of a JPEG file."""
    return (content.rindex(b"\xff\xda") + len(content)) // 2


def _flip(content: bytes) -> bytes:
    here = _middle(content)
    return content[:here] + bytes(byte ^ 0x10 for byte in content[here : here + 4]) + content[here + 4 :]


def _rotated() -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = 6
    return exif


def _long_text() -> PngImagePlugin.PngInfo:
    text = PngImagePlugin.PngInfo()
    text.add_text("Comment", "x" * (1 << 21), zip=True)
    return text


def _tiff_of_floats(big: bool) -> bytes:
    """Three floats per pixel, which Pillow does not know; `big` is BigTIFF in the other byte order."""
    order, entry, inline = (">", "HHQ", 8) if big else ("<", "HHI", 4)
    pixels = np.zeros((36, 48, 3), order + "f4") + 0.5
    tags = {256: 48, 257: 36, 258: 32, 259: 1, 262: 2, 273: 0, 277: 3, 278: 36, 279: pixels.nbytes, 339: 3}
    start = 512
    lists = {258: struct.pack(order + "3H", *[32] * 3), 339: struct.pack(order + "3H", *[3] * 3)}
    values, behind = [], b""
    for tag, value in tags.items():
        if len(lists.get(tag, b"")) > inline:
            count, field = 3, struct.pack(order + ("Q" if big else "I"), start + len(behind))
            behind += lists[tag]
        elif tag in lists:
            count, field = 3, lists[tag]
        else:
            count, field = 1, struct.pack(order + "I", start + 64 if tag == 273 else value)
        kind = 3 if tag in lists else 4
        values.append(struct.pack(order + entry, tag, kind, count) + field.ljust(inline, b"\0"))
    header = (
        b"MM" + struct.pack(">HHHQQ", 43, 8, 0, 16, len(tags))
        if big
        else struct.pack("<2sHIH", b"II", 42, 8, len(tags))
    )
    return (header + b"".join(values)).ljust(start, b"\0") + behind.ljust(64, b"\0") + pixels.tobytes()


BAD: dict[str, Make] = {
    "truncated": _damaging(lambda content: content[: _middle(content)]),
    "missing end marker": _damaging(lambda content: content[: content.rindex(b"\xff\xd9")]),
    "garbage": lambda path: _write(path, np.random.default_rng(0).bytes(3000)),
    "header of 100 bytes": lambda path: _write(path, encoded()[:100]),
    "GIF": _writing(format="GIF"),
    "truncated PNG": lambda path: _write(path, encoded(format="PNG")[:-200]),
    "empty": lambda path: _write(path, b""),
    "missing": _remove,
    "unreadable": _block,
}

GOOD: dict[str, Make] = {
    "PNG": _writing(format="PNG"),
    "WebP": _writing(format="WEBP"),
    "RGBA": _writing(picture().convert("RGBA"), "PNG"),
    "16-bit PNG": _writing(Image.fromarray(np.arange(48 * 36, dtype=np.uint16).reshape(36, 48) * 37), "PNG"),
    "gray": _writing(picture().convert("L")),
    "CMYK": _writing(picture().convert("CMYK")),
    "progressive": _writing(progressive=True),
    "EXIF rotation": _writing(exif=_rotated()),
    "animated": _writing(format="WEBP", save_all=True, append_images=[picture().rotate(180)]),
    "early end marker": _damaging(lambda content: content[: _middle(content)] + b"\xff\xd9"),
    "flipped bits": _damaging(_flip),
    "long text": _writing(format="PNG", pnginfo=_long_text()),
    "TIFF of floats": lambda path: _write(path, _tiff_of_floats(big=False)),
    "BigTIFF": lambda path: _write(path, _tiff_of_floats(big=True)),
}
