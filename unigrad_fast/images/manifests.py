"""The images of a run: the same lists on all ranks, or the same error."""

from __future__ import annotations

import hashlib
import os
import warnings
from typing import Any

import numpy as np

from unigrad_fast.config import Config
from unigrad_fast.pipelines import Manifest
from unigrad_fast.runtime.errors import DataError, UserError
from unigrad_fast.runtime.process_group import World, gather, on_all_ranks

SAMPLED = 256  # images whose sizes a run remembers


def read_manifests(config: Config, world: World) -> tuple[Manifest, Manifest | None, list[str]]:
    """Training manifest, validation manifest (None without `data.val`), and warnings for the user.

    One rank per node reads first, and fills the cache for the others. All ranks must call this together.

    Raises:
        UserError: there is no folder of training images.
        DataError: on all ranks, when a folder cannot be used on one of them or they see different images.
    """
    if config.data.train is None:
        raise UserError("data.train = null: no training images; give their folder with --data.train FOLDER")
    folders = [folder for folder in (config.data.train, config.data.val) if folder is not None]
    manifests: list[Manifest] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)

        def read() -> None:
            manifests.extend(Manifest.open(folder) for folder in folders)

        for turn in (True, False):
            on_all_ranks(read if (world.local_rank == 0) == turn else lambda: None)
    digests = gather([digest(manifest) for manifest in manifests])
    for number, folder in enumerate(folders):
        for rank, theirs in enumerate(digests):
            if theirs[number] != digests[0][number]:
                raise DataError(
                    f"{folder}: ranks 0 and {rank} see different images there; give all machines the same files"
                )
    said = list(dict.fromkeys(str(warning.message) for warning in caught))
    if len(folders) == 2 and len({os.path.realpath(folder) for folder in folders}) == 1:
        said.append(
            f"data.val = {config.data.val}: is data.train as well, so every image finds itself and the accuracy means "
            "nothing; give images that are not trained on"
        )
    return manifests[0], manifests[1] if config.data.val is not None else None, said


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
