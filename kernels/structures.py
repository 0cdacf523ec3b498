"""How the rows that a rank sends end: in a few numbers about them (see `tails`)."""

from __future__ import annotations

from .heuristics import blocks

TAIL = 5  # numbers with which a rank's rows end: three digits of how many rows it has, and two flags
DIGIT = 256  # their base: bf16 holds all whole numbers up to it


def tail_rows(width: int) -> int:
    """Rows of so many channels that hold the numbers of a tail; all else in them is 0."""
    return blocks(TAIL, width)
