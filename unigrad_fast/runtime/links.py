"""Links that lead nowhere. Imports nothing that may be missing."""

from __future__ import annotations

import os
from pathlib import Path


def dangling_link(path: Path) -> str | None:
    """What is wrong with a path that is a link that leads nowhere, or lies below one; None when it does not."""
    for place in (path, *path.parents):
        if os.path.exists(place):
            break
        if os.path.islink(place):
            return f"{place} is a link to {os.readlink(place)}, which is not there; make that, or give another path"
    return None
