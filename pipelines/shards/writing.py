"""Prepares the images of a shard, as they are or smaller, and writes the shard and its part of the index."""

import hashlib
import io
import os
import re
import struct
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from ..files.headers import FORMAT_OF, FORMATS, declared, reason, size_in, stored_size
from ..files.npz_files import read_arrays
from ..files.tar_format import BLOCK, header_of, padded
from ..files.whole_files import whole, write_whole
from ..manifest import Manifest
from ..reading.timed import TimedReader
from .archives import UNFINISHED

ROW = ("at", "length", "label", "width", "height", "digest", "before", "again")  # of an image; before: original bytes
_ENDINGS = {kind: extension.encode() for extension, kind in reversed(FORMAT_OF.items())} | {"MPO": b".jpg"}
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
        opened = Image.open(io.BytesIO(content), formats=FORMATS)
    except Image.DecompressionBombError as error:
        return Prepared(image, defect=str(error))
    except (OSError, SyntaxError, ValueError) as error:
        if (kind := _decoded_in_training(content)) is not None:
            return Prepared(image, content, _ENDINGS[kind[0]], kind[1], len(content))
        return Prepared(image, defect=reason(error) if isinstance(error, OSError) else str(error))
    try:
        with opened as decoded:
            size = stored_size(decoded)
            decoded.load()  # finds damaged images now, not in a training run
            ending, before = _ENDINGS[decoded.format], len(content)
            again = short is not None and min(size) > short and decoded.mode in _COLOURS
            if again:
                size = tuple(max(short, round(side * short / min(decoded.size))) for side in decoded.size)
                content, ending = _smaller(decoded, size, quality), b".jpg"
    except OSError as error:
        return Prepared(image, defect=reason(error))
    except (SyntaxError, ValueError, EOFError, struct.error) as error:
        return Prepared(image, defect=str(error) or type(error).__name__)
    return Prepared(image, content, ending, size, before, again)


def _decoded_in_training(content: bytes) -> tuple[str, tuple[int, int]] | None:
    """Format and size of an image whose header Pillow refuses, if the decoder of training reads it; else None."""
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


def write_shard(
    folder: Path,
    number: int,
    manifest: Manifest,
    keys: list[bytes],
    prepared: Iterator[Prepared],
    told: Callable[[int], None],
) -> None:
    """Writes one shard, and the part of the index for it before the shard gets its final name."""
    names, rows, left_out = [], [], []
    digest = hashlib.blake2b(digest_size=16)
    with whole(folder / shard_name(number)) as file:

        def add(piece: bytes) -> None:
            digest.update(piece)
            file.write(piece)

        for one in prepared:
            if one.defect:
                line = f"{_escaped(manifest.path(one.image))}\t{' '.join(one.defect.split())}"
                left_out.append(line.encode("utf-8", "surrogateescape"))
            else:
                name, label = keys[one.image] + one.ending, -1
                head = header_of(name, len(one.content))
                if manifest.labels is not None:
                    label = int(manifest.labels[one.image])
                names.append(name)
                rows.append(
                    (
                        file.tell() + len(head),
                        len(one.content),
                        label,
                        *one.size,
                        short_digest(one.content),
                        one.before,
                        one.again,
                    )
                )
                add(head + padded(one.content))
                if manifest.labels is not None:
                    text = str(label).encode()
                    add(header_of(keys[one.image] + b".cls", len(text)) + padded(text))
            told(1)
        add(bytes(2 * BLOCK))  # the end mark
        file.flush()  # before the part, so that a full disk names the shard
        part = io.BytesIO()
        np.savez(
            part,
            rows=np.array(rows, np.int64).reshape(-1, len(ROW)),
            names=np.frombuffer(b"\0".join(names), np.uint8),
            left_out=np.frombuffer(b"\n".join(left_out), np.uint8),
            bytes=file.tell(),
            digest=np.frombuffer(digest.digest(), np.uint8),
        )
        (folder / UNFINISHED).mkdir(exist_ok=True)
        write_whole(folder / UNFINISHED / f"{number:06}.npz", part.getbuffer())
    if not rows:
        os.unlink(folder / shard_name(number))


def shard_name(number: int) -> str:
    return f"shard-{number:06}.tar"


def read_part(folder: Path, number: int) -> dict[str, np.ndarray]:
    """The part of the index for a shard. Raises one of `DAMAGED` if the shard was not begun."""
    return read_arrays(folder / UNFINISHED / f"{number:06}.npz")


def _escaped(name: str) -> str:
    """A name on one line, with control characters and backslashes escaped as in Python."""
    return re.sub(r"[\0-\x1f\x7f\\]", lambda match: repr(match[0])[1:-1], name)


def short_digest(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little", signed=True)
