"""Numbers among an objective's settings."""

from __future__ import annotations

import math
import numbers


def require_whole(name: str, number: int) -> None:
    """Raises TypeError for what is no whole number, ValueError for what is not positive."""
    if not isinstance(number, numbers.Integral) or isinstance(number, bool):
        raise TypeError(f"{name} {number!r} is no whole number; use an int")
    if number < 1:
        raise ValueError(f"{name} {number} is not positive; use 1 or more")


def require_number(name: str, number: float, least: float = 0.0, exclusive: bool = False) -> None:
    """Raises TypeError for what is no number, ValueError for what is out of range."""
    if not isinstance(number, numbers.Real) or isinstance(number, bool):
        raise TypeError(f"{name} {number!r} is no number; use a float")
    if not (number > least if exclusive else number >= least) or math.isinf(number):
        wanted = f"more than {least:g}" if exclusive else f"{least:g} or more"
        wanted = f"a finite number, {wanted}" if math.isinf(number) else wanted
        raise ValueError(f"{name} {number} is out of range; use {wanted}")
