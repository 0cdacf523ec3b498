"""`unigrad-fast doctor`: reports what the machine has, what a run will use, what is missing, and which parts work.

torch, DALI, DeepSpeed and modules that import them are imported inside functions, because they may be missing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from unigrad_fast.runtime.errors import UserError


@dataclass(frozen=True)
class Finding:
    """One row of a table.

    Attributes:
        name, found: the subject, and what was found.
        status: "ok"; "note" for things that a run can do without; "skipped"; anything else is a problem.
        remedy: what to do about it.
        times: milliseconds of the first and the second call of a part.
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
    """Raises UserError with a line per problem, if there are any among the findings."""
    lines = [f"{each.name}: {each.found or each.status}; {each.remedy}" for each in found if each.is_problem]
    if lines:
        raise UserError("\n".join(lines))


def first_line(error: Exception) -> str:
    """The message of an error in one line, with its type unless the message alone is clear."""
    text = str(error).partition("encountered:")[2] or str(error)  # DALI's message starts with the place of the error
    said = next((line.strip() for line in text.splitlines() if line.strip()), "")
    said = re.sub(r"^\[[^]\s]*:\d+\]\s*", "", said)  # source line of gloo
    named = isinstance(error, ImportError | OSError | UserError) and said
    return said if named else f"{type(error).__name__}: {said}".removesuffix(": ")
