"""Findings of checks, and running checks one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeVar

Where = TypeVar("Where")


class Finding(NamedTuple):
    """One line of the table: what was checked, what was found, and whether that is as expected."""

    what: str
    found: str
    good: bool

    def __str__(self) -> str:
        return f"{'ok  ' if self.good else 'FAIL'}  {self.what:34}  {self.found}"


def findings(checks: Iterable[Callable[[Where], Iterator[Finding]]], where: Where) -> Iterator[Finding]:
    """The findings of each check, or the error that it ends with; an error does not stop the other checks."""
    for check in checks:
        try:
            yield from check(where)
        except Exception as error:
            yield Finding(check.__name__, f"{type(error).__name__}: {error}".replace("\n", " ")[:300], False)
