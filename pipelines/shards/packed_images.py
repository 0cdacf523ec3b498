"""Prepares an image for a shard: the bytes of its file, or a smaller copy."""

import io
import struct
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from PIL import Image

from ..files.headers import FORMATS, declared, reason, size_in, stored_size
from ..reading.timed import TimedReader

_ENDINGS = {
    **{"JPEG": b".jpg", "MPO": b".jpg", "PNG": b".png", "WEBP": b".webp", "BMP": b".bmp"},
    **{"PPM": b".ppm", "TIFF": b".tif"},
}
_COLOURS = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")  # modes that fit into 8-bit RGB


@dataclass(frozen=True)
class Prepared:
    """An image ready for writing, or the reason why it is left out."""

    image: int
    content: bytes = b""
    ending: bytes = b""
    size: tuple[int, int] = (0, 0)
    before: int = 0  # bytes
    again: bool = False  # whether it was encoded again
    defect: str | None = None


def prepare(reader: TimedReader, image: int, short: int | None, quality: int) -> Prepared:
    """Reads and decodes an image, and shrinks it if its short side has more pixels than `short`."""
    try:
        content = reader.read(image)
    except OSError as error:
        return Prepared(image, defect=reason(error))
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as decoded:
            size = stored_size(decoded)
            decoded.load()  # finds damaged images now, not in a training run
            ending, before = _ENDINGS[decoded.format], len(content)
            again = short is not None and min(size) > short and decoded.mode in _COLOURS
            if again:
                size = tuple(max(short, round(side * short / min(decoded.size))) for side in decoded.size)
                content, ending = _smaller(decoded, size, quality), b".jpg"
    except Image.DecompressionBombError as error:
        return Prepared(image, defect=str(error))
    except (OSError, SyntaxError, ValueError, EOFError, struct.error) as error:
        if (kind := _decoded_in_training(content)) is not None:
            return Prepared(image, content, _ENDINGS[kind[0]], kind[1], len(content))
        return Prepared(
            image, defect=reason(error) if isinstance(error, OSError) else str(error) or type(error).__name__
        )
    return Prepared(image, content, ending, size, before, again)


def _decoded_in_training(content: bytes) -> tuple[str, tuple[int, int]] | None:
    """Format and size of an image that Pillow refuses, if the decoder of training reads it; else None."""
    try:
        from ..reading.damage import defects

        file = io.BytesIO(content)
        size = size_in(file)
        (defect,) = defects([np.frombuffer(content, np.uint8)], sizes=np.array([size]))
        return None if defect else (declared(file)[0], size)
    except (ImportError, OSError, struct.error, LookupError, ValueError):  # without DALI Pillow decides
        return None


def _smaller(image: Image.Image, size: tuple[int, int], quality: int) -> bytes:
    # Lanczos keeps the most detail, and Pillow scales its support to the output pixel, so nothing aliases.
    image = image if image.mode in ("L", "RGB") else image.convert("RGB")
    encoded = io.BytesIO()
    image.resize(size, Image.Resampling.LANCZOS).save(encoded, "JPEG", quality=quality)
    return encoded.getvalue()


def ahead(
    pool: ThreadPoolExecutor, function: Callable[[int], Prepared], images: list[int], depth: int
) -> Iterator[Prepared]:
    """Results in order, computed in the pool at most `depth` ahead."""
    waiting: deque = deque()
    for image in images:
        waiting.append(pool.submit(function, image))
        if len(waiting) >= depth:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()
