"""Decodes every image of a manifest once, and records which ones training cannot use and which are unusual.

Worker processes decode, one per thread: a file that crashes the decoder ends its worker, not the scan.
"""

import os
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

from ..cores import usable_cores
from ..manifest import Manifest
from .files import append, begin, go_on, open_rows
from .processes import results


@dataclass
class Progress:
    """Number of images done, out of `total`, and how many of them are bad."""

    total: int
    done: int = 0
    bad: int = 0


def scan(
    manifest: Manifest,
    folder: str | os.PathLike,
    threads: int | None = None,
    source: str | os.PathLike | None = None,
    timeout: float = 60.0,
) -> Generator[Progress, None, None]:
    """Decodes the images that have no row in FOLDER/manifest.csv yet, and appends theirs.

    Yields the progress, always the same object, as rows are written; first with the rows of an earlier scan.

    Args:
        manifest: the images.
        folder: folder of the rows, created if it does not exist. If the files of the source have changed since an
            earlier scan, its rows are dropped with a warning.
        threads: number of worker processes, which are forked; None for one per core. More of them hide the latency
            of network storage.
        source: absolute path of the images; None for the manifest's root.
        timeout: seconds after which a file that does not answer counts as bad.

    Raises:
        DataError: the folder cannot be written, holds something else, or another scan is writing there;
            while iterating, the storage stops answering.
        OSError: while iterating, if the disk is full; a later scan continues the rows.
    """
    folder = Path(folder)
    progress = Progress(len(manifest))
    with open_rows(folder) as rows:
        begin(manifest, os.fspath(source or manifest.root), folder, rows)
        progress.done, progress.bad = go_on(manifest, rows)
        yield progress
        for done in results(manifest, progress.done, threads or usable_cores(), timeout):
            if done:
                content, images, bad = done
                append(rows, content)
                progress.done += images
                progress.bad += bad
            yield progress
