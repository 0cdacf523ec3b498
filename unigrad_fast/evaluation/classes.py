"""Matches validation images with the classes of the training images, by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from unigrad_fast import config
from unigrad_fast.pipelines import Manifest
from unigrad_fast.pipelines.manifest import part
from unigrad_fast.runtime.wording import count

NAMED = 3  # classes that a message names
LABEL = "label them (class folders, labels in a list, or .cls in shards)"
GIVE = "give labelled images of the training classes with --data.val IMAGES"


@dataclass(frozen=True)
class Obstacle:
    """Why there are no validation images of known classes.

    Attributes:
        key: the key of `data` whose images are the reason.
        problem, remedy: texts for the user.
    """

    key: Literal["train", "val"]
    problem: str
    remedy: str

    def told(self, data: config.Data) -> str:
        """One line that names the images by key and path."""
        path = getattr(data, self.key)
        return f"data.{self.key} = {'null' if path is None else path}: {self.problem}; {self.remedy}"


@dataclass(frozen=True)
class Match:
    """Validation images of known classes, or why there are none.

    Attributes:
        val: the validation images of classes that occur in training; labels index the training classes.
        obstacle: None if there are such images.
        told: lines for the user about classes that one side lacks.
    """

    val: Manifest | None = None
    obstacle: Obstacle | None = None
    told: tuple[str, ...] = ()


def match(train: Manifest, val: Manifest | None) -> Match:
    """Find the validation images whose classes have training images."""
    if val is None:
        return Match(obstacle=Obstacle("val", "no validation images", GIVE))
    if train.labels is None:
        return Match(obstacle=Obstacle("train", "the training images have no labels", LABEL))
    if val.labels is None:
        return Match(obstacle=Obstacle("val", "the validation images have no labels", f"{LABEL}, or {GIVE}"))
    known = np.bincount(train.labels, minlength=len(train.classes)) > 0
    if np.count_nonzero(known) < 2:
        only = _named(train.classes, known)
        problem = f"all images belong to one class, {only}"
        return Match(obstacle=Obstacle("train", problem, "check whether the class folders are one level lower"))
    position = {name: number for number, name in enumerate(train.classes) if known[number]}
    places = np.array([position.get(name, -1) for name in val.classes], np.int64)
    labels = places[val.labels]
    judged, asked = labels >= 0, np.bincount(val.labels, minlength=len(val.classes)) > 0
    if not judged.any():
        sides = (("training", train.classes, known), ("validation", val.classes, asked))
        differing = "; ".join(f"{kind} {_named(classes, used)}" for kind, classes, used in sides)
        problem = f"training and validation images have different classes ({differing})"
        return Match(obstacle=Obstacle("val", problem, GIVE))
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
