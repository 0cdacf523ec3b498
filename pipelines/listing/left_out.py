"""What the listing of a source tells the user, such as the files that are ignored, counted by extension."""

import json
import warnings
from collections import Counter
from contextlib import suppress

import numpy as np

from ..files.headers import EXTENSIONS
from ..files.tar_format import text_of

_SHOWN = 5  # endings in a message


def ending(name: bytes) -> bytes:
    """The extension of a file's name in lower case; empty if it has none."""
    stem, dot, last = name.rpartition(b".")
    return dot + last.lower() if stem else b""


def ignored(source: str, counts: Counter[bytes]) -> list[str]:
    """A line about ignored files; none if there are none."""
    if not counts:
        return []
    shown = counts.most_common(_SHOWN)
    kinds = [f"{number:,} {text_of(kind) or 'without an extension'}" for kind, number in shown]
    if len(counts) > _SHOWN:
        kinds.append(f"{counts.total() - sum(number for _, number in shown):,} others")
    return [f"{source}: ignored {', '.join(kinds)}; images end in {', '.join(EXTENSIONS)}"]


def runs_ignored(source: str, runs: list[bytes]) -> list[str]:
    """A line about folders of runs among the images; none if there are none."""
    if not runs:
        return []
    example = text_of(min(runs))
    return [f"{source} contains {len(runs)} folders of runs among the images ({example} for one); they are ignored"]


def tell(lines: list[str]) -> None:
    """Warns of each line."""
    for line in lines:
        warnings.warn(line, stacklevel=4)


def to_array(lines: list[str]) -> np.ndarray:
    """Lines as an array for the cache."""
    return np.array(json.dumps(lines))


def from_array(array: np.ndarray | None) -> list[str] | None:
    """Lines from the cache; None if there are none, they are damaged, or an older version wrote something else."""
    with suppress(ValueError, AttributeError, TypeError):
        if array is not None and array.dtype.kind == "U":
            lines = json.loads(array.item())
            if isinstance(lines, list) and all(isinstance(line, str) for line in lines):
                return lines
    return None
