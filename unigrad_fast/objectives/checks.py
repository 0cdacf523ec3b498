"""Values of an objective's settings."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence


def require_whole(name: str, number: int) -> None:
    """Raises TypeError for what is no whole number, ValueError for what is not positive."""
    if not isinstance(number, numbers.Integral) or isinstance(number, bool):
        raise TypeError(f"{name} {number!r} is no whole number; use an int")
    if number < 1:
        raise ValueError(f"{name} {number} is not positive; use 1 or more")


def require_number(name: str, number: float, exclusive: bool = False, below: float = math.inf) -> None:
    """Raises TypeError for what is no number, ValueError for what is out of range."""
    if not isinstance(number, numbers.Real) or isinstance(number, bool):
        raise TypeError(f"{name} {number!r} is no number; use a float")
    if number >= below and not math.isinf(number):
        raise ValueError(f"{name} {number} is outside [0, {below:g})")
    if not (number > 0 if exclusive else number >= 0) or math.isinf(number):
        wanted = "more than 0" if exclusive else "0 or more"
        wanted = f"a finite number, {wanted}" if math.isinf(number) else wanted
        raise ValueError(f"{name} {number} is out of range; use {wanted}")


def require_among(name: str, value: str, known: Sequence[str]) -> None:
    """Raises ValueError for an unknown name."""
    if value not in known:
        raise ValueError(f"{name} {value!r} is unknown; use one of {', '.join(known)}")
