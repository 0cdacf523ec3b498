"""Writes the images of a manifest into tar shards, and compares shards with what was written.

    FOLDER/shard-000000.tar, ...    KEY.jpg and, with labels, KEY.cls; KEY is the image's path without its ending
    FOLDER/classes.txt              names of the classes, a line each, in the order of the labels
    FOLDER/index.npz                where each image lies, its pixels, its digest: a start reads this alone
    FOLDER/left-out.txt             images that cannot be decoded, and why, a line each; line breaks and the like in a
                                    name are written as in Python
    FOLDER/shards.json              what the shards were made of, written first; last, the digest of the index

A shard is written under another name, flushed to the disk and renamed, and what goes into it depends on its number
alone. So an interrupted run goes on at the first missing shard and ends with the same bytes as one that was not.
"""

import hashlib
import io
import json
import os
import re
import shutil
import struct
import tarfile
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from .errors import DataError
from .headers import FORMATS, reason
from .manifest import Manifest
from .order import epoch_order
from .shards import BLOCK, CLASSES, DAMAGED, INDEX, UNFINISHED, read_arrays, tar_files

DESCRIPTION, LEFT_OUT = "shards.json", "left-out.txt"
_ENDINGS = {"JPEG": b".jpg", "PNG": b".png", "WEBP": b".webp", "BMP": b".bmp"}
_COLOURS = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")  # modes that RGB of 8 bits holds
_ROW = ("at", "length", "label", "width", "height", "digest", "before", "again")  # of an image; before: bytes
_PIECE = 1 << 24  # bytes that are read at once


@dataclass(frozen=True)
class Packing:
    """How images are packed.

    Attributes:
        images_per_shard: before those that cannot be decoded are left out.
        short_side: pixels; images with a longer short side are made smaller and encoded again. None copies all.
        quality: of the JPEG files that are encoded again, 1 to 100.
        shuffle_seed: of the order of the images; None keeps the manifest's.
    """

    images_per_shard: int = 10_000
    short_side: int | None = None
    quality: int = 90
    shuffle_seed: int | None = 0


@dataclass(frozen=True)
class Packed:
    """What shards hold: their number, images, bytes of these before and after, how many were encoded again."""

    shards: int
    images: int
    bytes_before: int
    bytes_after: int
    encoded_again: int
    left_out: int


def pack(
    manifest: Manifest, source: str, folder: Path, packing: Packing, threads: int, told: Callable[[int], None]
) -> Packed:
    """Writes shards, or those that are missing.

    Args:
        source: where the manifest's images are from, for the description.
        folder: for the shards: a new one, an empty one, or one in which the same was begun.
        threads: that decode, resize and encode.
        told: is called with a number of images after these are done.

    Raises:
        DataError: the folder holds something else, the disk is too small, a class has a line break in its name, or no
            image can be decoded.
        OSError: the folder cannot be written.
    """
    for name in manifest.classes:
        if "\n" in name:
            raise DataError(f"{source}: class {name!r} has a line break, and {CLASSES} a class per line; rename it")
    description = {
        "source": source,
        "fingerprint": manifest.fingerprint,
        "images": len(manifest),
        **asdict(packing),
        "quality": packing.quality if packing.short_side else None,
    }
    done = _begin(folder, description)
    if "index" in done:
        shutil.rmtree(folder / UNFINISHED, ignore_errors=True)  # in case that very last step was interrupted
        told(len(manifest))
        return Packed(**done["packed"])
    order = np.arange(len(manifest))
    if packing.shuffle_seed is not None:
        order = epoch_order(packing.shuffle_seed, 0, len(manifest))
    parts = [
        order[start : start + packing.images_per_shard] for start in range(0, len(order), packing.images_per_shard)
    ]
    missing = [number for number in range(len(parts)) if not _is_written(folder, number)]
    if packing.short_side is None:
        _require_space(manifest, folder, sum(len(parts[number]) for number in missing))
    told(len(order) - sum(len(parts[number]) for number in missing))
    keys = _keys(manifest) if missing else []
    pool = ThreadPoolExecutor(threads)
    try:
        for number in missing:
            prepared = _ahead(
                pool, lambda image: _prepare(manifest, image, packing), parts[number].tolist(), 4 * threads
            )
            _write_shard(folder, number, manifest, keys, prepared, told)
    finally:
        pool.shutdown(cancel_futures=True)
    return _finish(folder, len(parts), manifest, description)


def read_description(folder: Path) -> dict[str, Any]:
    """What the shards in a folder were made of; nothing where none were begun."""
    with suppress(FileNotFoundError, NotADirectoryError):
        try:
            return json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))
        except ValueError as error:
            raise DataError(f"{folder / DESCRIPTION} is damaged ({error}); give another folder") from error
    return {}


def verify(folder: Path, threads: int, told: Callable[[int], None]) -> list[str]:
    """Reads all shards and compares them with their digests; what differs, a line each.

    Args:
        told: is called with a number of bytes after these are compared.

    Raises:
        DataError: the folder holds no finished shards.
    """
    description = read_description(folder)
    if "index" not in description:
        raise DataError(f"{folder}: holds no finished shards of `data shard`; finish them first")
    try:
        content = (folder / INDEX).read_bytes()
        if hashlib.blake2b(content, digest_size=16).hexdigest() != description["index"]:
            raise ValueError
        with np.load(io.BytesIO(content)) as arrays:
            index = {key: arrays[key] for key in arrays.files}
    except DAMAGED as error:
        why = reason(error) if isinstance(error, OSError) else "differs from what was written"
        return [f"{folder / INDEX}: {why}"]
    files = index["files"].tolist()
    tars = [name for name in files if name != CLASSES]
    problems = [
        f"{folder / name}: was not written with the others" for name in tar_files(os.fspath(folder)) if name not in tars
    ]
    with ThreadPoolExecutor(threads) as pool:
        for found in pool.map(lambda number: _verify_file(folder, number, index, told), range(len(files))):
            problems += found
    return problems


def _begin(folder: Path, description: dict[str, Any]) -> dict[str, Any]:
    """The description that the folder has, which is written where it has none."""
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise DataError(f"folder = {folder}: is a file; give a new folder")
    before = read_description(folder)
    if before:
        differing = [
            f"folder = {folder}: has shards of {key} = {json.dumps(before.get(key))}, and not {json.dumps(value)}"
            for key, value in description.items()
            if key not in ("source", "fingerprint") and before.get(key) != value
        ]
        if before.get("fingerprint") != description["fingerprint"]:
            change = "a name, size or modification time is another one"
            differing.append(f"folder = {folder}: has shards of other images from {before.get('source')}; {change}")
        if differing:
            raise DataError("\n".join([*differing, "continue with the same images and options, or give a new folder"]))
        return before
    folder.mkdir(parents=True, exist_ok=True)
    if any(not name.startswith(".") for name in os.listdir(folder)):
        raise DataError(f"folder = {folder}: is not empty and holds no shards of `data shard`; give a new folder")
    _write_whole(folder / DESCRIPTION, [json.dumps(description, indent=1).encode()])
    return description


def _is_written(folder: Path, number: int) -> bool:
    with suppress(*DAMAGED):
        part = _part(folder, number)
        return not len(part["rows"]) or os.path.getsize(folder / _name(number)) == part["bytes"]
    return False


def _require_space(manifest: Manifest, folder: Path, images: int) -> None:
    """Raises DataError where copies of so many images do not fit on the disk."""
    each = manifest.total_bytes / len(manifest) + 2 * BLOCK * (1 + manifest.has_labels)
    needed, free = images * each, shutil.disk_usage(folder).free
    if needed > free:
        raise DataError(
            f"folder = {folder}: {needed / 1e9:.1f} GB are needed and {free / 1e9:.1f} GB are free; make room, give a "
            "folder on a larger disk, or make the images smaller with --short_side"
        )


def _keys(manifest: Manifest) -> list[bytes]:
    """The name of each image in its shard without the ending: unique, without dots, from its path."""
    keys, seen = [], set()
    root = os.path.join(os.fsencode(manifest.root), b"")
    for image in range(len(manifest)):
        name = os.path.normpath(manifest.path_bytes(image)).removeprefix(root)
        if manifest.index is not None:
            name = name.partition(b"/")[2]
        folder, base = os.path.split(name.lstrip(b"/"))
        stem = os.path.join(folder, os.path.splitext(base)[0].replace(b".", b"_"))
        key, copies = stem, 1
        while key in seen:
            copies += 1
            key = b"%s-%d" % (stem, copies)
        seen.add(key)
        keys.append(key)
    return keys


@dataclass(frozen=True)
class _Prepared:
    """An image as it is to be written, or why it is left out."""

    image: int
    content: bytes = b""
    ending: bytes = b""
    size: tuple[int, int] = (0, 0)
    before: int = 0  # bytes
    again: bool = False  # whether it was encoded again
    defect: str | None = None


def _prepare(manifest: Manifest, image: int, packing: Packing) -> _Prepared:
    try:
        content = manifest.read(image)
        with Image.open(io.BytesIO(content), formats=FORMATS) as decoded:
            decoded.load()  # what cannot be decoded must not be found out by a training run
            ending, size, before = _ENDINGS[decoded.format], decoded.size, len(content)
            short = packing.short_side
            again = short is not None and min(size) > short and decoded.mode in _COLOURS
            if again:
                size = tuple(max(short, round(side * short / min(decoded.size))) for side in decoded.size)
                content, ending = _smaller(decoded, size, packing.quality), b".jpg"
    except OSError as error:
        return _Prepared(image, defect=reason(error))
    except (SyntaxError, ValueError, EOFError, struct.error, Image.DecompressionBombError) as error:
        return _Prepared(image, defect=str(error) or type(error).__name__)
    return _Prepared(image, content, ending, size, before, again)


def _smaller(image: Image.Image, size: tuple[int, int], quality: int) -> bytes:
    # Lanczos keeps the most detail, and Pillow widens it to what falls into a pixel, so nothing aliases.
    image = image if image.mode in ("L", "RGB") else image.convert("RGB")
    encoded = io.BytesIO()
    image.resize(size, Image.Resampling.LANCZOS).save(encoded, "JPEG", quality=quality)
    return encoded.getvalue()


def _ahead(
    pool: ThreadPoolExecutor, function: Callable[[int], _Prepared], images: list[int], depth: int
) -> Iterator[_Prepared]:
    """Results in order, made in the pool at most `depth` ahead."""
    waiting: deque = deque()
    for image in images:
        waiting.append(pool.submit(function, image))
        if len(waiting) >= depth:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _write_shard(
    folder: Path,
    number: int,
    manifest: Manifest,
    keys: list[bytes],
    prepared: Iterator[_Prepared],
    told: Callable[[int], None],
) -> None:
    """Writes one shard, and before it takes its name what the index is to say of it."""
    names, rows, left_out = [], [], []
    digest, position = hashlib.blake2b(digest_size=16), 0

    def pieces() -> Iterator[bytes]:
        for one in prepared:
            if one.defect:
                line = f"{_escaped(manifest.path(one.image))}\t{' '.join(one.defect.split())}"
                left_out.append(line.encode("utf-8", "surrogateescape"))
            else:
                name, label = keys[one.image] + one.ending, -1
                head = _header(name, len(one.content))
                if manifest.labels is not None:
                    label = int(manifest.labels[one.image])
                names.append(name)
                rows.append(
                    (
                        position + len(head),
                        len(one.content),
                        label,
                        *one.size,
                        _short(one.content),
                        one.before,
                        one.again,
                    )
                )
                yield head + _padded(one.content)
                if manifest.labels is not None:
                    text = str(label).encode()
                    yield _header(keys[one.image] + b".cls", len(text)) + _padded(text)
            told(1)
        yield bytes(2 * BLOCK)  # the end mark

    def counted() -> Iterator[bytes]:
        nonlocal position
        for piece in pieces():
            digest.update(piece)
            position += len(piece)
            yield piece

    def describe() -> None:
        encoded = io.BytesIO()
        np.savez(
            encoded,
            rows=np.array(rows, np.int64).reshape(-1, len(_ROW)),
            names=np.frombuffer(b"\0".join(names), np.uint8),
            left_out=np.frombuffer(b"\n".join(left_out), np.uint8),
            bytes=position,
            digest=np.frombuffer(digest.digest(), np.uint8),
        )
        (folder / UNFINISHED).mkdir(exist_ok=True)
        _write_whole(folder / UNFINISHED / f"{number:06}.npz", [encoded.getbuffer()])

    _write_whole(folder / _name(number), counted(), describe)
    if not rows:
        os.unlink(folder / _name(number))


def _finish(folder: Path, count: int, manifest: Manifest, description: dict[str, Any]) -> Packed:
    """Writes what lies beside the shards, last the description."""
    parts = [_part(folder, number) for number in range(count)]
    left_out = [line for part in parts for line in part["left_out"].tobytes().split(b"\n") if line]
    used = [number for number, part in enumerate(parts) if len(part["rows"])]
    if not used:
        raise DataError(f"none of {len(manifest)} images can be decoded; {os.fsdecode(left_out[0])}")
    if left_out:
        _write_whole(folder / LEFT_OUT, [line + b"\n" for line in left_out])
    files = [_name(number) for number in used]
    sizes, digests = [int(parts[number]["bytes"]) for number in used], [parts[number]["digest"] for number in used]
    if manifest.has_labels:
        classes = "".join(f"{name}\n" for name in manifest.classes).encode("utf-8", "surrogateescape")
        _write_whole(folder / CLASSES, [classes])
        files.append(CLASSES)
        sizes.append(len(classes))
        digests.append(np.frombuffer(hashlib.blake2b(classes, digest_size=16).digest(), np.uint8))
    rows = np.concatenate([parts[number]["rows"] for number in used])
    column = dict(zip(_ROW, rows.T, strict=True))
    names = [
        f"{_name(number)}/".encode() + name for number in used for name in parts[number]["names"].tobytes().split(b"\0")
    ]
    encoded = io.BytesIO()
    np.savez(
        encoded,
        files=np.array(files, np.str_),
        bytes=np.array(sizes, np.int64),
        file_digests=np.stack(digests),
        names=np.frombuffer(b"".join(names), np.uint8),
        offsets=np.concatenate([[0], np.cumsum(np.fromiter(map(len, names), np.int64, len(names)))]),
        shard=np.repeat(np.arange(len(used), dtype=np.int32), [len(parts[number]["rows"]) for number in used]),
        at=column["at"],
        length=column["length"],
        labels=column["label"] if manifest.has_labels else np.zeros(0, np.int64),
        classes=np.array(manifest.classes, np.str_),
        sizes=np.stack([column["width"], column["height"]], axis=1).astype(np.int32),
        digests=column["digest"],
    )
    _write_whole(folder / INDEX, [encoded.getbuffer()])
    packed = Packed(
        shards=len(used),
        images=len(rows),
        bytes_before=int(column["before"].sum()),
        bytes_after=int(column["length"].sum()),
        encoded_again=int(column["again"].sum()),
        left_out=len(left_out),
    )
    index = hashlib.blake2b(encoded.getbuffer(), digest_size=16).hexdigest()
    finished = {**description, "packed": asdict(packed), "index": index}
    _write_whole(folder / DESCRIPTION, [json.dumps(finished, indent=1).encode()])
    shutil.rmtree(folder / UNFINISHED)
    return packed


def _verify_file(folder: Path, number: int, index: dict[str, np.ndarray], told: Callable[[int], None]) -> list[str]:
    """What is wrong with one file, images by name."""
    path, wanted = folder / str(index["files"][number]), int(index["bytes"][number])
    digest = hashlib.blake2b(digest_size=16)
    try:
        with open(path, "rb") as file:
            while piece := file.read(_PIECE):
                digest.update(piece)
                told(len(piece))
            if file.tell() != wanted:
                return [f"{path}: has {file.tell()} bytes, {wanted} were written"]
            if digest.digest() == index["file_digests"][number].tobytes():
                return []
            problems = []
            for image in np.flatnonzero(index["shard"] == number).tolist():
                file.seek(int(index["at"][image]))
                if _short(file.read(int(index["length"][image]))) != int(index["digests"][image]):
                    name = index["names"][index["offsets"][image] : index["offsets"][image + 1]].tobytes()
                    problems.append(f"{folder / os.fsdecode(name)}: differs from what was written")
    except OSError as error:
        return [f"{path}: {reason(error)}"]
    return problems or [f"{path}: differs from what was written, outside of its images"]


def _name(number: int) -> str:
    return f"shard-{number:06}.tar"


def _part(folder: Path, number: int) -> dict[str, np.ndarray]:
    return read_arrays(folder / UNFINISHED / f"{number:06}.npz")


def _escaped(name: str) -> str:
    """A name that fits into a line, with control characters and backslashes as in Python."""
    return re.sub(r"[\0-\x1f\x7f\\]", lambda match: repr(match[0])[1:-1], name)


def _header(name: bytes, size: int) -> bytes:
    info = tarfile.TarInfo(name.decode("utf-8", "surrogateescape"))
    info.size, info.mode = size, 0o644
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def _padded(content: bytes) -> bytes:
    return content + bytes(-len(content) % BLOCK)


def _short(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little", signed=True)


def _write_whole(path: Path, pieces: Any, before_rename: Callable[[], None] = lambda: None) -> None:
    """Writes a file that is there as a whole and on the disk, or not at all. Raises OSError with its name."""
    draft = path.with_name(f".{path.name}.unfinished")
    try:
        with open(draft, "wb") as file:
            file.writelines(pieces)
            file.flush()
            os.fsync(file.fileno())
        before_rename()
        os.replace(draft, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # of the new name
        finally:
            os.close(folder)
    except OSError as error:
        error.filename = error.filename or os.fspath(path)  # a full disk names no file
        raise
    finally:
        draft.unlink(missing_ok=True)
