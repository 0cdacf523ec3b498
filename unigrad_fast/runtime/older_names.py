"""Older names of keys and commands: they still work, and a note on stderr says once what to write instead."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

from unigrad_fast.runtime.errors import UserError
from unigrad_fast.runtime.validation import shown


def renamed(keys: Mapping[str, Any], old: str, new: str, prefix: str = "", quiet: bool = False) -> dict[str, Any]:
    """A group of keys in which the value of an older key stands under the new one.

    Args:
        prefix: the dotted keys around the group, with a dot behind them, for messages.
        quiet: print no note, as for files that an earlier version wrote.

    Raises:
        UserError: both keys are given, with different values.
    """
    if old not in keys:
        return dict(keys)
    current = {key: value for key, value in keys.items() if key != old}
    if current.setdefault(new, keys[old]) != keys[old]:
        raise UserError(
            f"{prefix}{old} = {shown(keys[old])}: {prefix}{new} = {shown(current[new])} is given too, and "
            f"{prefix}{old} is its older name; leave {prefix}{old} out"
        )
    if not quiet:
        note(f"{prefix}{old}", f"{prefix}{new}")
    return current


@cache
def note(old: str, new: str) -> None:
    """Prints, once per process and on the first rank only, that a name has changed."""
    if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
        print(f"note: {old} is now {new}", file=sys.stderr)
