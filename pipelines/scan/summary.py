"""Summarizes the rows of a finished scan: bad images, duplicates, formats and sizes."""

import csv
import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ..files.whole_files import whole
from ..manifest import Manifest
from .files import BAD, TEXT, as_csv, name_of


@dataclass
class Summary:
    """Results of a finished scan.

    Attributes:
        images, bytes: number of images, and total size of their files.
        bad: positions in the manifest of the images that cannot be used.
        unread: the bad images whose bytes could not be read, perhaps because of the storage.
        reasons: number of bad images per kind of reason.
        first: path and reason of the first few bad ones.
        notes: number of usable images per kind of note.
        formats, colours: number of usable images per format and per colour mode.
        sizes: width and height of the smallest, the median and the largest usable image, by number of pixels.
        duplicates: number of images with the same bytes as an earlier one.
    """

    images: int
    bytes: int = 0
    bad: list[int] = field(default_factory=list)
    unread: list[int] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    first: list[tuple[str, str]] = field(default_factory=list)
    notes: Counter[str] = field(default_factory=Counter)
    formats: Counter[str] = field(default_factory=Counter)
    colours: Counter[str] = field(default_factory=Counter)
    sizes: list[tuple[int, int]] = field(default_factory=list)
    duplicates: int = 0


def summarize(manifest: Manifest, folder: str | os.PathLike, first: int = 5) -> Summary:
    """Reads the rows of a finished scan and writes bad.csv and duplicates.csv next to them; `first` as in `Summary`."""
    folder = Path(folder)
    found = Summary(images=len(manifest))
    sides = np.zeros((len(manifest), 2), np.int32)
    digests = np.zeros(len(manifest), np.uint64)
    with open(folder / "manifest.csv", **TEXT) as file, whole(folder / "bad.csv") as draft:
        draft.write(as_csv([("path", "reason")]))
        for index, row in enumerate(csv.DictReader(file)):
            found.bytes += int(row["bytes"] or 0)
            if row["bytes"] and int(row["bytes"]):
                digests[index] = int(row["digest"], 16)
            if row["note"].startswith(BAD):
                reason = row["note"].removeprefix(BAD)
                found.bad.append(index)
                found.unread += [] if row["bytes"] else [index]
                found.reasons[_kind(reason)] += 1
                found.first += [(row["path"], reason)] if len(found.bad) <= first else []
                draft.write(as_csv([(row["path"], reason)]))
                continue
            found.formats[row["format"]] += 1
            found.colours[row["colour"]] += 1
            found.notes.update(_kind(note) for note in row["note"].split("; ") if note)
            sides[index] = int(row["width"]), int(row["height"])
    found.sizes = _spread(sides[sides[:, 0] > 0])
    found.duplicates = _write_duplicates(manifest, digests, folder / "duplicates.csv")
    return found


def _kind(note: str) -> str:
    return note.partition(" (")[0]


def _spread(sides: np.ndarray) -> list[tuple[int, int]]:
    if not len(sides):
        return []
    order = np.argsort(sides.prod(axis=1, dtype=np.int64), kind="stable")
    return [tuple(sides[order[place]].tolist()) for place in (0, len(order) // 2, -1)]


def _write_duplicates(manifest: Manifest, digests: np.ndarray, path: Path) -> int:
    """Writes pairs of equal images (0 is the digest of empty files); returns how many equal an earlier one."""
    _, first, inverse = np.unique(digests, return_index=True, return_inverse=True)
    original = first[inverse.reshape(-1)]
    later = np.flatnonzero((original != np.arange(len(digests))) & (digests != 0))
    with whole(path) as draft:
        draft.write(as_csv([("path", "same_as")]))
        for index in later.tolist():
            draft.write(as_csv([(name_of(manifest, index), name_of(manifest, int(original[index])))]))
    return len(later)
