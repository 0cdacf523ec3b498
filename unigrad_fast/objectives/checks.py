"""Checks of an objective's settings."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence


def require_whole(name: str, number: int) -> None:
    """Raise TypeError if the value is not an integer, ValueError if it is below 1."""
    if not isinstance(number, numbers.Integral) or isinstance(number, bool):
        raise TypeError(f"{name} {number!r} is not an integer; use an int")
    if number < 1:
        raise ValueError(f"{name} {number} is too small; use 1 or more")


def require_number(name: str, number: float, exclusive: bool = False, below: float = math.inf) -> None:
    """Raise TypeError if the value is not a real number, ValueError if it is out of range."""
    if not isinstance(number, numbers.Real) or isinstance(number, bool):
        raise TypeError(f"{name} {number!r} is not a number; use a float")
    if number >= below and not math.isinf(number):
        raise ValueError(f"{name} {number} is outside [0, {below:g}); use a value in this range")
    if not (number > 0 if exclusive else number >= 0) or math.isinf(number):
        wanted = "more than 0" if exclusive else "0 or more"
        wanted = f"a finite number, {wanted}" if math.isinf(number) else wanted
        raise ValueError(f"{name} {number} is out of range; use {wanted}")


def require_among(name: str, value: str, known: Sequence[str]) -> None:
    """Raise ValueError if the name is unknown."""
    if value not in known:
        raise ValueError(f"{name} {value!r} is unknown; use one of {', '.join(known)}")
