"""The images of a run: the same lists on all ranks, or the same error."""

from __future__ import annotations

import hashlib
import os
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from unigrad_fast import config
from unigrad_fast.pipelines import Manifest
from unigrad_fast.runtime.errors import DataError, UserError
from unigrad_fast.runtime.process_group import World, gather, on_all_ranks, on_first

COMPARED = 16  # files by which a node knows those that rank 0 has listed
SAMPLED = 256  # images whose sizes a run remembers


def read_manifests(data: config.Data, world: World) -> tuple[Manifest, Manifest | None, list[str]]:
    """Training manifest, validation manifest (None without `data.val`), and warnings for the user.

    Rank 0 lists the images and hands its arrays over. One rank of each other node compares the files of a few images
    with what rank 0 has seen. Where they are others, as in a copy on a local disk, it lists all, to see that the images
    are the same. All ranks must call this together.

    Raises:
        UserError: there is no folder of training images.
        DataError: on all ranks, when a folder cannot be used on one of them or they see different images.
    """
    if data.train is None:
        raise UserError("data.train = null: no training images; give their folder with --data.train FOLDER")
    folders = [folder for folder in (data.train, data.val) if folder is not None]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        told = on_first(lambda: [_list(folder) for folder in folders])
        alone = world.rank != 0 and _sees_others(folders, told, world)
        again = on_all_ranks(lambda: [_list(folder) for folder in folders] if alone else [])
        own = told if world.rank == 0 else again
    digests = gather([digest(listed.manifest) for listed in own])
    for number, folder in enumerate(folders):
        for rank, theirs in enumerate(digests):
            if theirs and theirs[number] != digests[0][number]:
                raise DataError(
                    f"{folder}: ranks 0 and {rank} see different images there; give all machines the same files"
                )
    manifests = on_all_ranks(lambda: [_taken(*pair) for pair in zip(told, own or told, strict=True)])
    said = list(dict.fromkeys(str(warning.message) for warning in caught))
    if len(folders) == 2 and len({os.path.realpath(folder) for folder in folders}) == 1:
        said.append(
            f"data.val = {data.val}: is data.train as well, so every image finds itself and the accuracy means "
            "nothing; give images that are not trained on"
        )
    return manifests[0], manifests[1] if data.val is not None else None, said


@dataclass(frozen=True)
class _Listed:
    """What a rank found in a folder, and of some files inode, bytes and modification time in ns: a copy has others."""

    folder: Path
    manifest: Manifest
    traces: list[tuple[int, int, int]]


def _list(folder: Path) -> _Listed:
    manifest = Manifest.open(folder)
    return _Listed(folder, manifest, _traces(manifest))


def _traces(manifest: Manifest) -> list[tuple[int, int, int]]:
    """Of some images' files, or of their shards. Raises OSError where one is gone."""
    some = np.unique(np.linspace(0, len(manifest) - 1, COMPARED).astype(int))
    if manifest.index is None or manifest.shards is None:
        paths = [manifest.path(image) for image in some.tolist()]
    else:
        paths = [manifest.shards.path(shard) for shard in np.unique(manifest.index.shard[some]).tolist()]
    return [(found.st_ino, found.st_size, found.st_mtime_ns) for found in map(os.stat, paths)]


def _sees_others(folders: list[Path], told: list[_Listed], world: World) -> bool:
    """Whether this rank is to list for itself: its paths are others, or it is the one of its node that compares."""
    if folders != [listed.folder for listed in told]:
        return True
    try:
        return world.local_rank == 0 and any(_traces(listed.manifest) != listed.traces for listed in told)
    except OSError:
        return True


def _taken(told: _Listed, own: _Listed) -> Manifest:
    """What rank 0 has listed, with the shards as they are here; where the path is another one, what this rank has."""
    if own.folder != told.folder:
        return own.manifest
    shards = told.manifest.shards
    return told.manifest if shards is None else replace(told.manifest, shards=shards.found_again())


def digest(manifest: Manifest) -> str:
    """Of names and sizes in pixels, which equal copies on several machines share, whatever a scan found unusable."""
    return _digest(manifest, manifest.header_sizes())


def identity(manifest: Manifest) -> dict[str, Any]:
    """What a run remembers of its images, to know them again: a digest of the names, and the sizes of some."""
    some = np.unique(np.linspace(0, len(manifest) - 1, SAMPLED).astype(int))
    return {"names": _digest(manifest), "sizes": manifest.header_sizes()[some].tolist()}


def are_the_same(remembered: dict[str, Any], manifest: Manifest) -> bool:
    """Whether these are the images of a run: the same names, and but for a few the same sizes in pixels.

    A file that was damaged or repaired in the meantime does not make other images of them, a smaller copy does.
    """
    now = identity(manifest)
    pairs = [pair for pair in zip(remembered["sizes"], now["sizes"], strict=False) if min(*pair[0], *pair[1]) > 0]
    changed = sum(before != after for before, after in pairs)
    return remembered["names"] == now["names"] and changed <= max(1, len(pairs) // 10)


def _digest(manifest: Manifest, *arrays: np.ndarray) -> str:
    found = hashlib.blake2b(digest_size=16)
    for array in (manifest.names, manifest.offsets, *arrays):
        found.update(array.tobytes())
    return found.hexdigest()
