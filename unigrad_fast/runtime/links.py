"""Checks for dangling links and for folders that cannot be made. Imports nothing that may be missing."""

from __future__ import annotations

import os
from pathlib import Path

from unigrad_fast.runtime.errors import UserError


def dangling_link(path: Path) -> str | None:
    """What is wrong with a path that is a dangling link or lies below one; None for any other path."""
    for place in (path, *path.parents):
        if os.path.exists(place):
            break
        if os.path.islink(place):
            return f"{place} is a link to {os.readlink(place)}, which does not exist; create it, or give another path"
    return None


def require_folder(output: Path) -> None:
    """Raises UserError if no folder can be made: the path or a parent is a file, or a dangling link."""
    if problem := dangling_link(output):
        raise UserError(f"output = {output}: {problem}")
    existing = next(path for path in (output, *output.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise UserError(f"output = {output}: is a file or lies below one; give a folder")
