"""Caches listings between starts: image sizes, unusable images, and the index of shards.

There is a file per source in `$UNIGRAD_CACHE` or `~/.cache/unigrad-fast`, valid as long as the fingerprint matches.
"""

import contextlib
import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from ..files.npz_files import DAMAGED, read_arrays, within


def digest(*parts: Any) -> str:
    """The fingerprint of names, file states and everything else that determines a listing: bytes, arrays, or texts."""
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        found.update("\0".join(part).encode("utf-8", "surrogateescape") if isinstance(part, list) else part)
    return found.hexdigest()


def cache_file(source: str, cache: str | os.PathLike | None) -> Path | None:
    """The cache file of a source, in the given folder or the default one; None if there is no home folder."""
    try:
        folder = Path(cache or os.environ.get("UNIGRAD_CACHE") or "~/.cache/unigrad-fast").expanduser()
    except RuntimeError:  # a user without a home folder
        return None
    return folder / f"manifest-{hashlib.blake2b(os.fsencode(source), digest_size=8).hexdigest()}.npz"


def recall(store: Path | None, fingerprint: str) -> dict[str, np.ndarray]:
    """Cached arrays; empty if the cache has none for this fingerprint, or is damaged."""
    with contextlib.suppress(*DAMAGED):
        if store is not None:
            content = read_arrays(store)
            if content["fingerprint"].tolist() == fingerprint:
                return content
    return {}


def fits(content: dict[str, np.ndarray], count: int) -> bool:
    """Whether cached sizes and marks, if there are any, are valid for `count` images."""
    sizes, unusable = sizes_in(content, count), content.get("unusable", np.zeros(0, np.int64))
    return (
        sizes.dtype == np.int32
        and sizes.shape == (count, 2)
        and bool((sizes >= 0).all())
        and unusable.dtype == np.int64
        and unusable.ndim == 1
        and within(unusable, count)
    )


def sizes_in(content: dict[str, np.ndarray], count: int) -> np.ndarray:
    """Cached sizes, or zeros."""
    return content["sizes"] if "sizes" in content else np.zeros((count, 2), np.int32)


def remember(store: Path | None, **arrays: Any) -> None:
    """Writes the arrays of a source; failing to write is not an error."""
    if store is None:
        return
    with contextlib.suppress(OSError):
        store.parent.mkdir(parents=True, exist_ok=True)
        # Several ranks may write at once: each writes its own draft, and the last rename wins.
        with tempfile.NamedTemporaryFile(dir=store.parent, prefix=f".{store.name}.", delete=False) as draft:
            try:
                np.savez(draft, **arrays)
                draft.flush()
                os.replace(draft.name, store)
            except OSError:
                os.unlink(draft.name)
