"""The images of a run: the same lists on all ranks, or the same error."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from unigrad_fast import config
from unigrad_fast.pipelines import Manifest
from unigrad_fast.pipelines.listing import cache
from unigrad_fast.runtime.errors import DataError, UserError
from unigrad_fast.runtime.process_group import World, gather, on_all_ranks, on_first
from unigrad_fast.runtime.wording import count

COMPARED = 16  # files that a node compares with those that rank 0 has listed
SAMPLED = 256  # images whose sizes a run records


def read_manifests(data: config.Data, world: World) -> tuple[Manifest, Manifest | None, list[str]]:
    """Training manifest, validation manifest (None without `data.val`), and warnings for the user.

    Rank 0 lists the images and sends its arrays to the others. One rank of each other node compares the files of a few
    images with those that rank 0 has seen. If they differ, as in a copy on a local disk, it lists all images, to check
    that they are the same. All ranks must call this together.

    Raises:
        UserError: no folder of training images is given.
        DataError: on all ranks, if a folder cannot be used on one of them or they see different images.
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
    digests = gather([(digest(listed.manifest), len(listed.manifest)) for listed in own])
    for number, folder in enumerate(folders):
        for rank, theirs in enumerate(digests):
            if theirs and theirs[number] != digests[0][number]:
                seen = f"{digests[0][number][1]:,} and {theirs[number][1]:,}"
                raise DataError(
                    f"{folder}: ranks 0 and {rank} see different images ({seen}); give all machines the same files"
                )
    manifests = on_all_ranks(lambda: [_taken(*pair) for pair in zip(told, own or told, strict=True)])
    said = list(dict.fromkeys(str(warning.message) for warning in caught))
    return manifests[0], manifests[1] if data.val is not None else None, said


def same_images(data: config.Data, so: str) -> list[str]:
    """A warning if images are validated that the classifier has; `so` is what this does to that classifier."""
    if data.train is None or data.val is None or os.path.realpath(data.train) != os.path.realpath(data.val):
        return []
    return [
        f"data.val = {data.val}: is the same as data.train, so {so} and the accuracy is meaningless; give images that "
        "are not in data.train"
    ]


@dataclass(frozen=True)
class _Listed:
    """The images that a rank found in a folder, and traces of some files."""

    folder: Path
    manifest: Manifest
    traces: list[tuple[int, int, int] | None]


def _list(folder: Path) -> _Listed:
    manifest = Manifest.open(folder)
    return _Listed(folder, manifest, _traces(manifest))


def _traces(manifest: Manifest) -> list[tuple[int, int, int] | None]:
    """Inode, bytes and modification time (ns) of some image files, or of their shards; None for one that is gone."""
    some = np.unique(np.linspace(0, len(manifest) - 1, COMPARED).astype(int))
    return [_trace(path) for path in manifest.storage.files(some.tolist())]


def _trace(path: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:  # a bad image like any other
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _sees_others(folders: list[Path], told: list[_Listed], world: World) -> bool:
    """Whether this rank must list the images itself: its paths differ, or it compares for its node and finds others."""
    if folders != [listed.folder for listed in told]:
        return True
    return world.local_rank == 0 and any(_traces(listed.manifest) != listed.traces for listed in told)


def _taken(told: _Listed, own: _Listed) -> Manifest:
    """The manifest of rank 0, with the shards found here; or this rank's own, if its path differs."""
    if own.folder != told.folder:
        return own.manifest
    return replace(told.manifest, storage=told.manifest.storage.found_again())


def digest(manifest: Manifest) -> str:
    """Digest of names and sizes in pixels: equal for copies on several machines, and after a scan."""
    return cache.digest(manifest.names, manifest.offsets, manifest.header_sizes(), manifest.storage.contents.encode())


def evaluated(manifest: Manifest) -> str:
    """Digest of names, sizes in pixels and in bytes, and the class of each image: equal for copies of the same files.

    Other images under the same names, or other labels of the same images, have another result.
    """
    labels = b"" if manifest.labels is None else manifest.labels.astype(np.int64)
    return cache.digest(
        manifest.names,
        manifest.offsets,
        manifest.header_sizes(),
        manifest.lengths.astype(np.int64),
        labels,
        manifest.classes,
        manifest.storage.contents.encode(),
    )


def identity(manifest: Manifest) -> dict[str, Any]:
    """Identifies the images of a run: their number, a digest of the names, and names and sizes of some images."""
    some = np.unique(np.linspace(0, len(manifest) - 1, SAMPLED).astype(int))
    return {
        "count": len(manifest),
        "names": cache.digest(manifest.names, manifest.offsets),
        "some": [_name(manifest, image) for image in some.tolist()],
        "sizes": manifest.header_sizes()[some].tolist(),
        "contents": manifest.storage.contents,
    }


def difference(remembered: dict[str, Any], manifest: Manifest) -> str | None:
    """How images differ from those of a run; None if they have the same names and, with few exceptions, sizes.

    Files that were damaged or repaired in the meantime are tolerated; a smaller copy of the images is not.

    Args:
        remembered: the `identity` of the run's images; in early checkpoints without `count`, `some` and `contents`.
    """
    now = identity(manifest)
    if remembered.get("contents", "") != now["contents"]:
        return f"{remembered.get('contents') or 'files'} then, {now['contents'] or 'files'} now"
    before, after = ([tuple(size) for size in each["sizes"]] for each in (remembered, now))
    pairs = [pair for pair in zip(before, after, now["some"], strict=False) if min(*pair[0], *pair[1]) > 0]
    changed = [pair for pair in pairs if pair[0] != pair[1]]
    if remembered["names"] == now["names"] and len(changed) <= max(1, len(pairs) // 10):
        return None
    if "count" not in remembered:
        return "their names, number or sizes in pixels differ"
    counts = f"{count(remembered['count'], 'image')} then, {now['count']:,} now"
    if remembered["names"] == now["names"]:
        (*size, name) = changed[0]
        had, has = (f"{width} x {height}" for width, height in size)
        return f"{counts}; {name} had {had} pixels and has {has}"
    there, known = {_name(manifest, image) for image in range(len(manifest))}, set(remembered["some"])
    if gone := next((name for name in remembered["some"] if name not in there), None):
        return f"{counts}; {gone} is gone"
    if remembered["count"] <= SAMPLED and (new := next((name for name in now["some"] if name not in known), None)):
        return f"{counts}; {new} is new"
    return f"{counts}; their names or their order differ"


def _name(manifest: Manifest, image: int) -> str:
    start, end = manifest.offsets[image : image + 2]
    return os.fsdecode(manifest.names[start:end].tobytes())
