"""What was found out: one row of a table, what an error says in one line, and the refusal that follows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from unigrad_fast.runtime.errors import UserError


@dataclass(frozen=True)
class Finding:
    """One row of a table.

    Attributes:
        name, found: of what, and what it is.
        status: "ok"; "note" for what a run can do without; "skipped"; anything else is a problem.
        remedy: what to do about it.
        times: milliseconds of the first and the second call of a part that was tried.
    """

    name: str
    found: str = ""
    status: str = "ok"
    remedy: str = ""
    times: tuple[float, ...] = ()

    @property
    def is_problem(self) -> bool:
        return self.status not in ("ok", "note", "skipped")


def refuse(found: Sequence[Finding]) -> None:
    """Raises UserError when there are problems among the findings, a line for each."""
    lines = [f"{each.name}: {each.found or each.status}; {each.remedy}" for each in found if each.is_problem]
    if lines:
        raise UserError("\n".join(lines))


def first_line(error: Exception) -> str:
    """What an error says, in one line, with its type where the words alone may say little."""
    text = str(error).partition("encountered:")[2] or str(error)  # DALI begins with where, and goes on with what
    said = next((line.strip() for line in text.splitlines() if line.strip()), "")
    said = re.sub(r"^\[[^]\s]*:\d+\]\s*", "", said)  # gloo's own source line
    named = isinstance(error, ImportError | OSError | UserError) and said
    return said if named else f"{type(error).__name__}: {said}".removesuffix(": ")
