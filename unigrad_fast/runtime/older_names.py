"""Former names of keys and commands: they still work, and a note on stderr gives the current name once."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

from unigrad_fast.runtime.errors import UserError
from unigrad_fast.runtime.validation import shown


def renamed(keys: Mapping[str, Any], old: str, new: str, prefix: str = "", quiet: bool = False) -> dict[str, Any]:
    """A group of keys with the value of a former key moved to its current name.

    Args:
        prefix: the dotted path of the group with a trailing dot, for messages.
        quiet: print no note, for files that an earlier version wrote.

    Raises:
        UserError: both keys are given, with different values.
    """
    if old not in keys:
        return dict(keys)
    current = {key: value for key, value in keys.items() if key != old}
    if current.setdefault(new, keys[old]) != keys[old]:
        raise UserError(
            f"{prefix}{old} = {shown(keys[old])}: is the former name of {prefix}{new}, which is "
            f"{shown(current[new])}; leave {prefix}{old} out"
        )
    if not quiet:
        note(f"{prefix}{old}", f"{prefix}{new}")
    return current


@cache
def note(old: str, new: str) -> None:
    """Prints once per process, on rank 0 only, that a name has changed."""
    if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
        print(f"note: {old} is now {new}", file=sys.stderr)
