"""The images of a run: the same lists on all ranks, or the same error."""

from __future__ import annotations

import hashlib
import warnings

from unigrad_fast.config import Config
from unigrad_fast.distributed import World, gather, on_all_ranks
from unigrad_fast.errors import DataError, UserError
from unigrad_fast.pipelines import Manifest


def read_manifests(config: Config, world: World) -> tuple[Manifest, Manifest | None, list[str]]:
    """Training manifest, validation manifest (None without `data.val`), and warnings for the user.

    One rank per node reads first, and fills the cache for the others. All ranks must call this together.

    Raises:
        UserError: there is no folder of training images.
        DataError: on all ranks, when a folder cannot be used on one of them or they see different images.
    """
    if config.data.train is None:
        raise UserError(f"data.train = null: no training images; name their folder in {config.output}/config.yaml")
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
    return manifests[0], manifests[1] if config.data.val is not None else None, said


def digest(manifest: Manifest) -> str:
    """Of names and sizes in pixels, which equal copies on several machines share, whatever a scan found unusable."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(manifest.names.tobytes())
    digest.update(manifest.offsets.tobytes())
    digest.update(manifest.header_sizes().tobytes())
    return digest.hexdigest()
