"""Images that a run could not use: told, counted, and listed in RUN/bad_images.jsonl."""

from __future__ import annotations

import json
from pathlib import Path

from unigrad_fast.distributed import World, gather
from unigrad_fast.errors import DataError, RunStopped
from unigrad_fast.pipelines import Failure, Manifest

FILE = "bad_images.jsonl"
SHOWN = 5


class BadImages:
    """All ranks hold the same list; rank 0 writes it. A line is one image in one micro-batch.

    Args:
        folder: of the run, which may hold the list of its earlier part; None writes nothing.
        manifest: the training images.
        most: share of the images that may be bad.

    Raises:
        DataError: already the headers that cannot be read, and the images that a scan found bad, are more.
    """

    def __init__(self, folder: Path | None, manifest: Manifest, most: float, world: World):
        self.path = None if folder is None else folder / FILE
        self.manifest, self.most, self.world = manifest, most, world
        self._new: list[Failure] = []  # of this rank, since the ranks last exchanged theirs
        self.known = {(failure.step, failure.image): failure.reason for failure in _read(self.path)}
        self.images = {image for _, image in self.known} | set(manifest.unreadable().tolist())
        if self.too_many:
            raise DataError(self._list("cannot be read or were found bad by a scan", manifest.unreadable().tolist()))

    @property
    def too_many(self) -> bool:
        return len(self.images) > self.most * len(self.manifest)

    def note(self, failures: list[Failure]) -> None:
        """This rank's, of one micro-batch."""
        self._new += failures

    @property
    def waiting(self) -> bool:
        """Whether this rank has some that the others do not know of."""
        return bool(self._new)

    def exchange(self) -> list[str]:
        """Makes the list the same on all ranks, which call this together; what there is to tell.

        Raises:
            RunStopped: on all ranks, when there are too many.
            OSError: the list cannot be written.
        """
        found = {(failure.step, failure.image): failure for part in gather(self._new) for failure in part}
        found = {key: found[key] for key in sorted(found.keys() - self.known.keys())}
        self._new = []
        told = []
        for (_, image), failure in found.items():
            if image not in self.images:
                told.append(f"{_printable(failure.path)}: {failure.reason}; another image takes its place")
            self.images.add(image)
        self.known |= {key: failure.reason for key, failure in found.items()}
        if found and self.path is not None and self.world.rank == 0:
            with open(self.path, "a", encoding="utf-8") as file:
                file.writelines(json.dumps(vars(failure)) + "\n" for failure in found.values())
        return told

    def require_few(self) -> None:
        """Raises RunStopped when there are too many."""
        if self.too_many:
            raise RunStopped(self._list("cannot be used", sorted(self.images)) + f"; all are listed in {self.path}")

    def _list(self, what: str, images: list[int]) -> str:
        reasons = {image: reason for (_, image), reason in self.known.items()}
        first = [
            _printable(
                f"{self.manifest.path(image)}: {reasons[image]}" if image in reasons else self.manifest.complaint(image)
            )
            for image in images[:SHOWN]
        ]
        more = f", and {len(images) - SHOWN} more" if len(images) > SHOWN else ""
        return (
            f"{len(self.images)} of {len(self.manifest)} images {what}, more than data.max_bad_fraction = "
            f"{self.most:g} allows: {'; '.join(first)}{more}; `unigrad-fast data scan` lists all of them"
        )


def _printable(name: str) -> str:
    """Of a file name that may hold bytes that are no text."""
    return name.encode("utf-8", "backslashreplace").decode()


def _read(path: Path | None) -> list[Failure]:
    """What an earlier part of the run found; a line that was not finished is left out."""
    found: list[Failure] = []
    if path is None:
        return found
    try:
        with open(path, encoding="utf-8") as file:
            for line in file:
                try:
                    found.append(Failure(**json.loads(line)))
                except (ValueError, TypeError):
                    continue
    except FileNotFoundError:
        pass
    return found
