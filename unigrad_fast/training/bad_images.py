"""Images that a run could not use: reported, counted, and listed in RUN/bad_images.jsonl."""

from __future__ import annotations

import json
import math
import os
from contextlib import suppress
from pathlib import Path

from unigrad_fast.pipelines import Failure, Manifest
from unigrad_fast.pipelines.reading.supply import allowed
from unigrad_fast.runtime.errors import DataError, RunStopped
from unigrad_fast.runtime.fallback import printable
from unigrad_fast.runtime.process_group import gather, on_first
from unigrad_fast.runtime.run_folder import RunFolder

SHOWN = 5  # in the message of a run that stops
MOST_TOLD = 50  # warnings of one image each


class BadImages:
    """All ranks hold the same list; rank 0 writes it. One line is one image in one micro-batch.

    Args:
        folder: the run's folder, which may hold the list of an earlier process; None writes nothing.
        manifest: the training images.
        most: largest share of the images that may be bad, as in `allowed`.
        goes_on: the run is resumed, so the earlier list counts.

    Raises:
        DataError: images with unreadable headers, and those that a scan found bad, already exceed that share.
    """

    def __init__(self, folder: Path | None, manifest: Manifest, most: float, goes_on: bool = True):
        self.path = None if folder is None else RunFolder(folder).bad_images
        self.manifest, self.most = manifest, most
        self._new: list[Failure] = []  # this rank's, since the last exchange
        self._told = 0
        self.latest: dict[tuple[int, int], str] = {}  # what the last exchange added
        earlier = self.path if goes_on else None
        self.known = {(failure.step, failure.image): failure.reason for failure in _read(earlier, len(manifest))}
        # Images found bad by this process only: those repaired since the run stopped do not count.
        self.images = set(manifest.unreadable().tolist())
        if self.too_many:
            raise DataError(self._list("cannot be read or were found bad by a scan"))

    @property
    def too_many(self) -> bool:
        return len(self.images) > allowed(len(self.manifest), self.most)

    @property
    def total(self) -> int:
        """Number of images that were bad at any time in the run."""
        return len(self.images | {image for _, image in self.known})

    def note(self, failures: list[Failure]) -> None:
        """Add this rank's failures in one micro-batch."""
        self._new += failures

    @property
    def waiting(self) -> bool:
        """Whether this rank has failures that the others have not seen."""
        return bool(self._new)

    def exchange(self) -> list[str]:
        """Makes the list the same on all ranks, which call this together; returns messages for the user.

        Raises:
            OSError: on all ranks, if the list cannot be written.
        """
        found = {(failure.step, failure.image): failure for part in gather(self._new) for failure in part}
        self._new = []
        told = []
        for (_, image), failure in sorted(found.items(), key=lambda item: item[0]):
            if image not in self.images:
                self.images.add(image)
                told.append(f"{printable(failure.path)}: {failure.reason}; replaced by another image")
        new = [found[key] for key in sorted(found.keys() - self.known.keys())]
        self.latest = {(failure.step, failure.image): failure.reason for failure in new}
        self.known |= self.latest
        if new and self.path is not None:
            on_first(lambda: self._write(new))
        left = max(0, MOST_TOLD - self._told)
        self._told += len(told)
        if len(told) > left:
            told = told[:left]
            if left:
                told.append(f"more than {MOST_TOLD} images could not be used; only bad_images.jsonl lists further ones")
        return told

    def require_few(self) -> None:
        """Raises RunStopped if too many images are bad."""
        if self.too_many:
            raise RunStopped(self._list("cannot be used") + f"; all are listed in {self.path}")

    def _write(self, failures: list[Failure]) -> None:
        with open(self.path, "ab+") as file:
            if file.tell() and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n":
                file.write(b"\n")  # the process was killed while it wrote
            file.writelines(json.dumps(vars(failure)).encode() + b"\n" for failure in failures)

    def told_at_start(self) -> str | None:
        """A message about images that are bad from the start; None if all can be used."""
        return f"{self._some('cannot be used')}; replaced by others" if self.images else None

    def _list(self, what: str) -> str:
        share = math.ceil(100 * len(self.images) / len(self.manifest)) / 100
        return (
            f"{self._some(f'{what}, more than data.max_bad_fraction = {self.most:g} allows')}; "
            "`unigrad-fast data scan` lists all of them; repair or remove them, or go on without them with "
            f"--data.max_bad_fraction {share:g}"
        )

    def _some(self, what: str) -> str:
        reasons = {image: reason for (_, image), reason in self.known.items()}
        first = [
            printable(
                f"{self.manifest.path(image)}: {reasons[image]}" if image in reasons else self.manifest.complaint(image)
            )
            for image in sorted(self.images)[:SHOWN]
        ]
        more = f", and {len(self.images) - SHOWN:,} more" if len(self.images) > SHOWN else ""
        return f"{len(self.images):,} of {len(self.manifest):,} images {what}: {'; '.join(first)}{more}"


def _read(path: Path | None, count: int) -> list[Failure]:
    """What an earlier process found among `count` images; malformed lines are skipped."""
    found: list[Failure] = []
    with suppress(FileNotFoundError):
        content = b"" if path is None else path.read_bytes()
        for line in content.splitlines():
            with suppress(ValueError, TypeError, KeyError):
                row = json.loads(line)
                failure = Failure(int(row["step"]), int(row["image"]), str(row["path"]), str(row["reason"]))
                if 0 <= failure.image < count:
                    found.append(failure)
    return found
