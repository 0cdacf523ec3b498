"""Commands as they are typed into a shell."""

from __future__ import annotations

import os
import shlex
from pathlib import Path


def typed(*words: str | Path) -> str:
    """A command that means these words wherever it is pasted, whatever names are among them."""
    return " ".join(_quoted(os.fspath(word)) for word in words)


def _quoted(word: str) -> str:
    if word.isprintable():
        return shlex.quote(word)
    codes = (
        f"\\x{byte:02x}" if byte < 32 or byte >= 127 or byte in b"'\\" else chr(byte) for byte in os.fsencode(word)
    )
    return f"$'{''.join(codes)}'"  # bytes that are no text, and line breaks
