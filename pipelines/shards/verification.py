"""Compares tar shards with the digests that were stored when they were packed."""

import hashlib
import io
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from ..errors import DataError
from ..files.headers import reason
from ..files.npz_files import DAMAGED, read_arrays
from .archives import CLASSES, tar_files
from .index import INDEX
from .packing import read_description
from .writing import short_digest

_PIECE = 1 << 24  # bytes to read at once


def verify(folder: Path, threads: int, told: Callable[[int], None]) -> list[str]:
    """Reads all shards and compares them with their digests; returns a line per difference.

    Args:
        told: called with the number of bytes that were just compared.

    Raises:
        DataError: the folder holds no finished shards.
    """
    description = read_description(folder)
    if "index" not in description:
        raise DataError(f"{folder}: holds no finished shards from `data shard`; finish them first")
    try:
        content = (folder / INDEX).read_bytes()
        if hashlib.blake2b(content, digest_size=16).hexdigest() != description["index"]:
            raise ValueError
        index = read_arrays(io.BytesIO(content))
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


def _verify_file(folder: Path, number: int, index: dict[str, np.ndarray], told: Callable[[int], None]) -> list[str]:
    """Differences in one file; images by name."""
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
                if short_digest(file.read(int(index["length"][image]))) != int(index["digests"][image]):
                    name = index["names"][index["offsets"][image] : index["offsets"][image + 1]].tobytes()
                    problems.append(f"{folder / os.fsdecode(name)}: differs from what was written")
    except OSError as error:
        return [f"{path}: {reason(error)}"]
    return problems or [f"{path}: differs from what was written, outside of its images"]
