"""Matches validation images with the classes of the training images, by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from unigrad_fast.pipelines import Manifest
from unigrad_fast.pipelines.manifest import part
from unigrad_fast.runtime.wording import count

NAMED = 3  # classes that a message names


@dataclass(frozen=True)
class Match:
    """Validation images of known classes, or why there are none.

    Attributes:
        val: the validation images of classes that occur in training; labels index the training classes.
        obstacle: text for the user; None if there are such images.
        told: lines for the user about classes that one side lacks.
    """

    val: Manifest | None = None
    obstacle: str | None = None
    told: tuple[str, ...] = ()


def match(train: Manifest, val: Manifest | None) -> Match:
    """Find the validation images whose classes have training images."""
    if val is None:
        return Match(obstacle="no validation images (data.val)")
    if train.labels is None or val.labels is None:
        unlabelled = "training" if train.labels is None else "validation"
        return Match(
            obstacle=f"the {unlabelled} images have no labels (class folders, labels in a list, or .cls in shards)"
        )
    known = np.bincount(train.labels, minlength=len(train.classes)) > 0
    if np.count_nonzero(known) < 2:
        only = _named(train.classes, known)
        return Match(
            obstacle=f"all images belong to one class, {only}; check whether the class folders are one level lower"
        )
    position = {name: number for number, name in enumerate(train.classes) if known[number]}
    places = np.array([position.get(name, -1) for name in val.classes], np.int64)
    labels = places[val.labels]
    judged, asked = labels >= 0, np.bincount(val.labels, minlength=len(val.classes)) > 0
    if not judged.any():
        sides = (("training", train.classes, known), ("validation", val.classes, asked))
        differing = "; ".join(f"{kind} {_named(classes, used)}" for kind, classes, used in sides)
        return Match(obstacle=f"training and validation images have different classes ({differing})")
    told = []
    missing = known & (np.bincount(labels[judged], minlength=len(known)) == 0)
    if missing.any():
        told.append(
            f"{np.count_nonzero(missing):,} of {count(np.count_nonzero(known), 'class')} in training have no "
            f"validation images ({_named(train.classes, missing)}); the accuracy is that of the others"
        )
    if not judged.all():
        told.append(
            f"{np.count_nonzero(~judged):,} of {len(val):,} validation images are left out because no training image "
            f"has their classes ({_named(val.classes, asked & (places < 0))})"
        )
    if not judged.all() or val.classes != train.classes:
        val = part(val, np.flatnonzero(judged), labels[judged], train.classes)
    return Match(val, told=tuple(told))


def without_unused(train: Manifest, val: Manifest) -> tuple[Manifest, Manifest, np.ndarray | None]:
    """The same images with only the classes of training images, and the positions that these had.

    The positions, int64 [classes], ascending, are None if every class has training images. A classifier of integer
    labels that are far apart needs no outputs for the integers between them.

    Args:
        val: labelled with the classes of `train`, each of which has training images; `match` ensures this.
    """
    used = np.unique(train.labels)
    if len(used) == len(train.classes):
        return train, val, None
    names = [train.classes[number] for number in used.tolist()]
    train, val = (part(one, np.arange(len(one)), np.searchsorted(used, one.labels), names) for one in (train, val))
    return train, val, used


def _named(classes: Sequence[str], chosen: np.ndarray) -> str:
    """The first names of the chosen classes, as valid Unicode text."""
    names = [
        classes[number].encode(errors="surrogateescape").decode(errors="replace") for number in np.flatnonzero(chosen)
    ]
    return ", ".join(names[:NAMED]) + (", ..." if len(names) > NAMED else "")
