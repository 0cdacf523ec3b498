"""The layout of the tail, a few numbers at the end of the rows that a rank sends (see `tails`)."""

from __future__ import annotations

from .heuristics import blocks

TAIL = 5  # numbers in a tail: three digits of the number of rows, and two flags
DIGIT = 256  # base of the digits: bf16 represents every integer up to it exactly


def tail_rows(width: int) -> int:
    """Number of rows of this width that a tail takes; the rest of these rows is 0."""
    return blocks(TAIL, width)
