"""How sources of images are written: a path, or a prefix and a path with what to take from it.

    PATH                                         a folder of images, a list of them, tar shards, or a Parquet file
    hf:PATH[:SPLIT[:IMAGES[:LABELS]]]            what Hugging Face's `datasets` saved, or a folder of Parquet files
    parquet:PATH[:IMAGES[:LABELS]]               a Parquet file, or a folder of them
    dataset:NAME                                 a Dataset that this process was given from Python

IMAGES and LABELS are names of columns. A part that is left empty is found.
"""

import os
from pathlib import Path

HUGGING_FACE, PARQUET, DATASET = "hf", "parquet", "dataset"
PARTS = {HUGGING_FACE: 3, PARQUET: 2, DATASET: 0}  # what may follow the path, by prefix


def kind_of(source: str | os.PathLike) -> tuple[str, str]:
    """The prefix of a source, empty for a path, and the rest."""
    text = os.fspath(source)
    kind, colon, rest = text.partition(":")
    return (kind, rest) if colon and kind in PARTS else ("", text)


def divided(rest: str, most: int) -> tuple[str, list[str]]:
    """The path of a source without its prefix, and the `most` parts that may follow it, empty where they are not given.

    A path may hold colons: it is the longest that exists.
    """
    path, *parts = rest.split(":")
    for count in range(min(most, len(parts)) + 1):
        longer = ":".join([path, *parts[: len(parts) - count]])
        if os.path.exists(longer):
            path, parts = longer, parts[len(parts) - count :]
            break
    else:
        path, parts = ":".join([path, *parts[most:]]), parts[:most]
    return path, [*parts, *[""] * (most - len(parts))]


def absolute_source(source: str | os.PathLike) -> str:
    """A source with an absolute path."""
    kind, rest = kind_of(source)
    if kind == DATASET:
        return f"{kind}:{rest}"
    path = os.path.abspath(os.path.expanduser(rest))
    return f"{kind}:{path}" if kind else path


def location(source: str | os.PathLike) -> Path | None:
    """The file or folder that holds a source's images; None if they are in memory."""
    kind, rest = kind_of(source)
    return None if kind == DATASET else Path(divided(rest, PARTS[kind])[0] if kind else rest)


def is_there(source: str | os.PathLike) -> bool:
    """Whether the file or folder of a source exists; True for what is in memory."""
    place = location(source)
    return place is None or os.path.exists(place)
