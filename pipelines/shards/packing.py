"""Writes the images of a manifest into tar shards.

    FOLDER/shard-000000.tar, ...    KEY.jpg and, with labels, KEY.cls; KEY is the image's path without its ending
    FOLDER/classes.txt              names of the classes, a line each, in the order of the labels
    FOLDER/index.npz                position, size in pixels and digest of each image; a start reads only this, and the
                                    ends of the shards, which tell whether it is theirs
    FOLDER/left-out.txt             images that cannot be read or decoded, and why, a line each; control characters
                                    in a name are escaped as in Python
    FOLDER/shards.json              the source of the shards, written first; the digest of the index is added last

A shard is written under a temporary name, flushed to the disk and renamed, and its content depends only on its number.
So an interrupted run continues at the first missing shard and produces the same bytes as one without interruption.
"""

import fcntl
import hashlib
import io
import json
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DataError
from ..files.npz_files import DAMAGED
from ..files.tar_format import BLOCK
from ..files.whole_files import write_whole
from ..manifest import Manifest
from ..order import epoch_order
from ..reading.timed import TimedReader
from ..storage import Ranges
from .archives import CLASSES, UNFINISHED, digests_of_ends
from .index import INDEX
from .writing import ROW, ahead, prepare, read_part, shard_name, write_shard

DESCRIPTION, LEFT_OUT = "shards.json", "left-out.txt"


@dataclass(frozen=True)
class Packing:
    """How images are packed.

    Attributes:
        images_per_shard: counted before images that cannot be decoded are left out.
        short_side: pixels; images with a longer short side are shrunk and encoded again. None copies all images.
        quality: JPEG quality of images that are encoded again, 1 to 100.
        shuffle_seed: seed of the order of the images; None keeps the manifest's order.
    """

    images_per_shard: int = 10_000
    short_side: int | None = None
    quality: int = 90
    shuffle_seed: int | None = 0


@dataclass(frozen=True)
class Packed:
    """Totals: shards, images, their bytes before and after, images that were encoded again or left out."""

    shards: int
    images: int
    bytes_before: int
    bytes_after: int
    encoded_again: int
    left_out: int


def pack(
    manifest: Manifest,
    source: str,
    folder: Path,
    packing: Packing,
    threads: int,
    told: Callable[[int], None],
    timeout: float = 60.0,
) -> Packed:
    """Writes the shards that do not exist yet.

    Args:
        source: path of the manifest's images, for the description.
        folder: folder for the shards: new, empty, or one in which the same packing was begun.
        threads: number of threads that decode, resize and encode.
        told: called with the number of images that were just finished.
        timeout: seconds after which a file that does not answer is left out.

    Raises:
        DataError: the folder holds something else or is being written, the disk is too small, a class has a line break
            in its name, no image can be decoded, or the storage stops answering.
        OSError: the folder cannot be written.
    """
    for name in manifest.classes:
        if "\n" in name:
            raise DataError(f"{source}: class {name!r} has a line break, but {CLASSES} has a class per line; rename it")
    description = {
        "source": source,
        "fingerprint": manifest.fingerprint,
        "images": len(manifest),
        **asdict(packing),
        "quality": packing.quality if packing.short_side else None,
    }
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise DataError(f"folder = {folder}: is a file; give a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        return _pack(manifest, folder, packing, threads, told, timeout, description)


def _pack(
    manifest: Manifest,
    folder: Path,
    packing: Packing,
    threads: int,
    told: Callable[[int], None],
    timeout: float,
    description: dict[str, Any],
) -> Packed:
    done = _begin(folder, description)
    if "index" in done:
        shutil.rmtree(folder / UNFINISHED, ignore_errors=True)  # in case the very last step was interrupted
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
    pool, reader = ThreadPoolExecutor(threads), TimedReader(manifest, timeout, threads)
    try:
        for number in missing:
            prepared = ahead(
                pool,
                lambda image: prepare(reader, image, packing.short_side, packing.quality),
                parts[number].tolist(),
                4 * threads,
            )
            write_shard(folder, number, manifest, keys, prepared, told)
    finally:
        pool.shutdown(cancel_futures=True)
        reader.close()
    return _finish(folder, len(parts), manifest, description)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Locks a folder against another packing; does nothing on a file system without locks."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise DataError(
            f"folder = {folder}: another `data shard` is writing there; wait for it, or give another folder"
        ) from None
    except OSError:
        pass
    try:
        yield
    finally:
        os.close(descriptor)


def read_description(folder: Path) -> dict[str, Any]:
    """The description of the shards in a folder; empty if none were begun."""
    with suppress(FileNotFoundError, NotADirectoryError):
        try:
            description = json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))
            if not isinstance(description, dict):
                raise ValueError("not a description of shards")
            return description
        except ValueError as error:
            raise DataError(f"{folder / DESCRIPTION} is damaged ({error}); give another folder") from error
    return {}


def _begin(folder: Path, description: dict[str, Any]) -> dict[str, Any]:
    """The description in the folder, which is written if there is none."""
    before = read_description(folder)
    if before:
        differing = [
            f"folder = {folder}: has shards with {key} = {json.dumps(before.get(key))}, not {json.dumps(value)}"
            for key, value in description.items()
            if key not in ("source", "fingerprint") and before.get(key) != value
        ]
        if before.get("fingerprint") != description["fingerprint"]:
            change = "a name, size or modification time differs"
            differing.append(f"folder = {folder}: has shards of other images from {before.get('source')}; {change}")
        if differing:
            raise DataError("\n".join([*differing, "continue with the same images and options, or give a new folder"]))
        return before
    if any(not name.startswith(".") for name in os.listdir(folder)):
        raise DataError(f"folder = {folder}: is not empty and holds no shards from `data shard`; give a new folder")
    write_whole(folder / DESCRIPTION, json.dumps(description, indent=1).encode())
    return description


def _is_written(folder: Path, number: int) -> bool:
    with suppress(*DAMAGED):
        part = read_part(folder, number)
        return not len(part["rows"]) or os.path.getsize(folder / shard_name(number)) == part["bytes"]
    return False


def _require_space(manifest: Manifest, folder: Path, images: int) -> None:
    """Raises DataError if copies of this number of images do not fit on the disk."""
    each = manifest.total_bytes / len(manifest) + 2 * BLOCK * (1 + manifest.has_labels)
    needed, free = images * each, shutil.disk_usage(folder).free
    if needed > free:
        raise DataError(
            f"folder = {folder}: the shards need {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free; free disk "
            "space, give a folder on a larger disk, or make the images smaller with --short_side"
        )


def _keys(manifest: Manifest) -> list[bytes]:
    """The name of each image in its shard, without extension: unique, without dots, from its path."""
    keys, seen, copies = [], set(), dict[bytes, int]()
    root = os.path.join(os.fsencode(manifest.root), b"")
    for image in range(len(manifest)):
        name = os.path.normpath(manifest.path_bytes(image)).removeprefix(root)
        if isinstance(manifest.storage, Ranges):
            name = name.partition(b"/")[2]
        folder, base = os.path.split(name.lstrip(b"/"))
        stem = os.path.join(folder, os.path.splitext(base)[0].replace(b".", b"_"))
        key = stem
        while key in seen:
            copies[stem] = copies.get(stem, 1) + 1
            key = b"%s-%d" % (stem, copies[stem])
        seen.add(key)
        keys.append(key)
    return keys


def _finish(folder: Path, count: int, manifest: Manifest, description: dict[str, Any]) -> Packed:
    """Writes the files next to the shards, last the description."""
    parts = [read_part(folder, number) for number in range(count)]
    left_out = [line for part in parts for line in part["left_out"].tobytes().split(b"\n") if line]
    used = [number for number, part in enumerate(parts) if len(part["rows"])]
    if not used:
        raise DataError(f"none of the {len(manifest)} images can be decoded; {os.fsdecode(left_out[0])}")
    if left_out:
        write_whole(folder / LEFT_OUT, b"".join(line + b"\n" for line in left_out))
    files = [shard_name(number) for number in used]
    sizes, digests = [int(parts[number]["bytes"]) for number in used], [parts[number]["digest"] for number in used]
    if manifest.has_labels:
        classes = "".join(f"{name}\n" for name in manifest.classes).encode("utf-8", "surrogateescape")
        write_whole(folder / CLASSES, classes)
        files.append(CLASSES)
        sizes.append(len(classes))
        digests.append(np.frombuffer(hashlib.blake2b(classes, digest_size=16).digest(), np.uint8))
    rows = np.concatenate([parts[number]["rows"] for number in used])
    column = dict(zip(ROW, rows.T, strict=True))
    names = [
        f"{shard_name(number)}/".encode() + name
        for number in used
        for name in parts[number]["names"].tobytes().split(b"\0")
    ]
    encoded = io.BytesIO()
    np.savez(
        encoded,
        files=np.array(files, np.str_),
        bytes=np.array(sizes, np.int64),
        file_digests=np.stack(digests),
        ends=digests_of_ends(os.fspath(folder), files),
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
    write_whole(folder / INDEX, encoded.getbuffer())
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
    write_whole(folder / DESCRIPTION, json.dumps(finished, indent=1).encode())
    shutil.rmtree(folder / UNFINISHED)
    return packed
