"""Validation images under the classes that training knows: by their names, whatever either side has besides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from unigrad_fast.pipelines import Manifest
from unigrad_fast.pipelines.part import part
from unigrad_fast.runtime.wording import count

NAMED = 3  # classes that a message names


@dataclass(frozen=True)
class Match:
    """Validation images that can be judged by training images, or why there are none.

    Attributes:
        val: the validation images of classes that training knows; labels are positions in the training's classes.
        obstacle: in words for the user; None where there are such images.
        told: lines for the user on what either side lacks.
    """

    val: Manifest | None = None
    obstacle: str | None = None
    told: tuple[str, ...] = ()


def match(train: Manifest, val: Manifest | None) -> Match:
    """Find the validation images of classes of which there are training images."""
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
        return Match(obstacle=f"all images are of one class, {only}; the class folders may lie one level lower")
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
            f"validation lacks {np.count_nonzero(missing):,} of {count(np.count_nonzero(known), 'class')} of the "
            f"training images ({_named(train.classes, missing)}); accuracy is that of the others"
        )
    if not judged.all():
        told.append(
            f"{np.count_nonzero(~judged):,} of {len(val):,} validation images are left out, for training does not know "
            f"their classes ({_named(val.classes, asked & (places < 0))})"
        )
    if not judged.all() or val.classes != train.classes:
        val = part(val, np.flatnonzero(judged), labels[judged], train.classes)
    return Match(val, told=tuple(told))


def _named(classes: Sequence[str], chosen: np.ndarray) -> str:
    """The first names of the chosen classes, as text that can be written anywhere."""
    names = [
        classes[number].encode(errors="surrogateescape").decode(errors="replace") for number in np.flatnonzero(chosen)
    ]
    return ", ".join(names[:NAMED]) + (", ..." if len(names) > NAMED else "")
