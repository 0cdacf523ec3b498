"""Links that lead nowhere, and folders that can be made. Imports nothing that may be missing."""

from __future__ import annotations

import os
from pathlib import Path

from unigrad_fast.runtime.errors import UserError


def dangling_link(path: Path) -> str | None:
    """What is wrong with a path that is a link that leads nowhere, or lies below one; None when it does not."""
    for place in (path, *path.parents):
        if os.path.exists(place):
            break
        if os.path.islink(place):
            return f"{place} is a link to {os.readlink(place)}, which is not there; make that, or give another path"
    return None


def require_folder(output: Path) -> None:
    """Raises UserError where no folder can be made: there is a file of that name or above it, or a dangling link."""
    if problem := dangling_link(output):
        raise UserError(f"output = {output}: {problem}")
    existing = next(path for path in (output, *output.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise UserError(f"output = {output}: is a file or lies below one; name a folder")
