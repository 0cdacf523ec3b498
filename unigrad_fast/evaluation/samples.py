"""Few of the training images: a balanced sample, a list in a file, or all but a held-out share."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import numpy as np

from unigrad_fast.pipelines import Manifest
from unigrad_fast.runtime.errors import UserError
from unigrad_fast.runtime.wording import count

HELD_OUT = 0.1  # share of each class's training images on which settings are chosen, if not on validation images


def places_in_class(labels: np.ndarray, seed: int) -> np.ndarray:
    """For each image its place, int64 from 0, among those of its class, in an order that is drawn with a seed."""
    order = np.random.default_rng(seed).permutation(len(labels))
    place = np.empty(len(labels), np.int64)
    for label in np.unique(labels):
        of_class = order[labels[order] == label]
        place[of_class] = np.arange(len(of_class))
    return place


def held_out(labels: np.ndarray, seed: int) -> np.ndarray:
    """Which training images to choose settings on, bool [n]: a tenth of each class, drawn with the seed.

    Raises UserError if no class has ten images.
    """
    held = places_in_class(labels, seed) < np.floor(HELD_OUT * np.bincount(labels)[labels])
    if not held.any():
        raise UserError("choose = train: no class has ten training images, a tenth of which to hold out; use val")
    return held


def balanced(labels: np.ndarray, fraction: float, seed: int) -> np.ndarray:
    """Positions, int64 ascending, of a share of the images, drawn with a seed.

    The numbers of images of two classes differ by at most one, unless the smaller class has no more.

    Raises UserError if there are fewer images than classes.
    """
    classes, total = len(np.unique(labels)), round(fraction * len(labels))
    if total < classes:
        least = math.ceil(1e4 * classes / len(labels)) / 1e4
        raise UserError(
            f"fraction = {fraction:g}: {count(total, 'label')} of {len(labels):,} images for "
            f"{count(classes, 'class')}; give at least {least:g}"
        )
    turn = np.random.default_rng([seed, 1]).permutation(labels.max() + 1)  # who takes one more comes first
    return np.sort(np.lexsort((turn[labels], places_in_class(labels, seed)))[:total])


def listed(manifest: Manifest, path: Path) -> np.ndarray:
    """Positions, int64 ascending, of the images that a file lists: names, one per line.

    A name may have none, some or all of the image's folders below the root, or be a path: ./ the root, or absolute.

    Raises UserError if the file cannot be read, names no image, or one that is not there or not the only one of its
    name, or leaves out a class.
    """
    try:
        lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").splitlines()
    except OSError as error:
        raise UserError(f"subset = {path}: cannot be read ({error.strerror}); give a file of names") from None
    names = _names(manifest)
    whole = set(names)  # these may begin or end with spaces
    written = [name for line in lines if (name := line if line in whole else line.strip())]
    if not written:
        raise UserError(f"subset = {path}: lists no image; write the name of a file per line")
    root = os.fsencode(manifest.root)
    wanted = [_below(root, name) for name in written]
    known: dict[int, dict[bytes, list[int]]] = {}  # positions by the last parts of the name, by the number of parts
    for parts in {name.count(b"/") + 1 for name in wanted}:
        known[parts] = defaultdict(list)
        for position, name in enumerate(names):
            known[parts][b"/".join(name.split(b"/")[-parts:])].append(position)
    found = [known[name.count(b"/") + 1].get(name, []) for name in wanted]
    absent = f"correct or remove them; names are relative to {manifest.root}"
    for problem, remedy in (("absent", absent), ("ambiguous", "write them with their folders")):
        bad = [
            name for name, at in zip(written, found, strict=True) if (not at if problem == "absent" else len(at) > 1)
        ]
        if bad:
            what = "not of a training image" if problem == "absent" else "of several training images"
            raise UserError(
                f"subset = {path}: {len(bad):,} of {count(len(wanted), 'name')} {'is' if len(bad) == 1 else 'are'} "
                f"{what}, first {_text(bad[0])}; {remedy}"
            )
    positions = np.unique([at for (at,) in found])
    assert manifest.labels is not None
    missing = np.setdiff1d(np.unique(manifest.labels), manifest.labels[positions])
    if len(missing):
        raise UserError(
            f"subset = {path}: has no image of {len(missing):,} of {count(manifest.used_classes, 'class')}, first "
            f"{_text(os.fsencode(manifest.classes[missing[0]]))}; list at least one of each"
        )
    return positions


def _below(root: bytes, name: bytes) -> bytes:
    """A name as it is below a root: a path there without the root, anything else as it is."""
    if name.startswith(b"./"):
        return os.path.normpath(name)
    if name.startswith(b"/"):
        folder, last = os.path.split(name)
        for place, whole in (
            (root, os.path.normpath(name)),
            (os.path.realpath(root), os.path.join(os.path.realpath(folder), last)),
        ):
            if whole.startswith(place + b"/"):
                return whole.removeprefix(place + b"/")
    return name


def as_list(manifest: Manifest) -> bytes:
    """The content of a file that lists all images of a manifest, for `listed`."""
    return b"".join(name + b"\n" for name in _names(manifest))


def _names(manifest: Manifest) -> list[bytes]:
    joined = manifest.names.tobytes()
    return [joined[start:end] for start, end in pairwise(manifest.offsets.tolist())]


def _text(name: bytes) -> str:
    return name.decode(errors="replace")
