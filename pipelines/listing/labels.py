"""Converts written labels, integers or names, into class indices."""

import os
import re
from collections.abc import Callable

import numpy as np

from ..errors import DataError
from .classes import composed

_LARGEST = 999_999
_SHOWN = 20  # characters of a label in a message


def number_labels(texts: list[bytes], place: Callable[[int], str]) -> tuple[np.ndarray | None, list[str]]:
    """Labels as class indices, int64 [n], and the class names; None and an empty list without labels.

    Args:
        texts: the labels: all integers, which are class indices, or names, which are sorted.
        place: returns the position of an image's label, for messages.
    """
    if not texts:
        return None, []
    kinds, ids = _distinct(texts)
    if not all(re.fullmatch(rb"-?\d+", kind) for kind in kinds):
        return name_labels(texts)
    numbers = []
    for text, kind in kinds.items():
        digits = text.lstrip(b"0") or b"0"
        # By length first, because int() refuses thousands of digits.
        if len(digits) > len(str(_LARGEST)) or not 0 <= int(digits) <= _LARGEST:
            where = place(int(np.argmax(ids == kind)))
            label = text.decode() if len(text) <= _SHOWN else f"{text[:_SHOWN].decode()}..."
            raise DataError(f"{where}: label {label} is out of range; integers must be in 0 to {_LARGEST}")
        numbers.append(int(digits))
    return np.array(numbers, np.int64)[ids], [str(number) for number in range(max(numbers) + 1)]


def name_labels(texts: list[bytes]) -> tuple[np.ndarray, list[str]]:
    """Labels as class indices, int64 [n], and the class names, which are the texts, sorted."""
    kinds, ids = _distinct(texts)
    names = sorted({composed(kind) for kind in kinds})
    position = {name: number for number, name in enumerate(names)}
    return np.array([position[composed(kind)] for kind in kinds], np.int64)[ids], list(map(os.fsdecode, names))


def _distinct(texts: list[bytes]) -> tuple[dict[bytes, int], np.ndarray]:
    """The distinct texts, numbered in the order in which they occur, and the number of each text."""
    kinds: dict[bytes, int] = {}
    return kinds, np.fromiter((kinds.setdefault(text, len(kinds)) for text in texts), np.int64, len(texts))
