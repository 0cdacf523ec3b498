"""Selects some images of a manifest, under other labels."""

import dataclasses

import numpy as np

from .manifest import Manifest


def part(manifest: Manifest, positions: np.ndarray, labels: np.ndarray, classes: list[str]) -> Manifest:
    """A manifest of the images at some positions; it caches nothing on the disk.

    Args:
        manifest: the whole manifest.
        positions: int64 [n], ascending.
        labels: int64 [n], positions in `classes`.
        classes: names of the classes.
    """
    names, offsets = _names(manifest.names, manifest.offsets, positions)
    index = manifest.index
    if index is not None:
        at = {key: getattr(index, key)[positions] for key in ("shard", "at", "length")}
        index = dataclasses.replace(
            index, names=names, offsets=offsets, labels=labels, classes=np.array(classes, dtype=np.str_), **at
        )
    place = {position: number for number, position in enumerate(positions.tolist())}
    return dataclasses.replace(
        manifest,
        names=names,
        offsets=offsets,
        sizes=manifest.sizes[positions],
        labels=labels,
        classes=classes,
        index=index,
        _store=None,
        _marked={place[position]: size for position, size in manifest._marked.items() if position in place},
    )


def _names(names: np.ndarray, offsets: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The names at some positions, concatenated, and where each starts."""
    lengths = np.diff(offsets)[positions]
    kept = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    source = np.repeat(offsets[positions] - kept[:-1], lengths) + np.arange(kept[-1])
    return names[source], kept
