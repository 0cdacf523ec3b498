"""Counts and reports files among the images that are ignored, by extension."""

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


def tell(source: str, counts: Counter[bytes]) -> None:
    """Warns of ignored files."""
    if not counts:
        return
    shown = counts.most_common(_SHOWN)
    kinds = [f"{number:,} {text_of(kind) or 'without an extension'}" for kind, number in shown]
    if len(counts) > _SHOWN:
        kinds.append(f"{counts.total() - sum(number for _, number in shown):,} others")
    warnings.warn(f"{source}: ignored {', '.join(kinds)}; images end in {', '.join(EXTENSIONS)}", stacklevel=4)


def to_array(counts: Counter[bytes]) -> np.ndarray:
    """Counts as an array for the cache."""
    texts = {kind.decode("latin-1"): number for kind, number in counts.items()}
    return np.array(json.dumps(texts))


def from_array(array: np.ndarray | None) -> Counter[bytes] | None:
    """Counts from the cache; None if there are none, or they are damaged."""
    with suppress(ValueError, AttributeError, TypeError):
        if array is not None and array.dtype.kind == "U":
            return Counter({kind.encode("latin-1"): int(n) for kind, n in json.loads(array.item()).items()})
    return None
