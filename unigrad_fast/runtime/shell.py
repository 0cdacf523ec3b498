"""Commands as they are typed into a shell."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path


def typed(*words: str | Path) -> str:
    """These words as a shell command, quoted so that it can be pasted whatever they contain."""
    return " ".join(_quoted(os.fspath(word)) for word in words)


def program(name: str, module: str) -> list[str]:
    """The words that start an installed program from this process's shell: its name, if the shell finds it."""
    if shutil.which(name):
        return [name]
    script = Path(sys.executable).parent / name  # in an environment that is not active
    if not script.is_file():
        return [sys.executable, "-m", module]
    return [str(script.relative_to(Path.cwd()) if script.is_relative_to(Path.cwd()) else script)]


def own(*words: str | Path) -> str:
    """A `unigrad-fast` command with these words, to be pasted into a shell."""
    return typed(*program("unigrad-fast", "unigrad_fast"), *words)


def _quoted(word: str) -> str:
    if word.isprintable():
        return shlex.quote(word)
    codes = (
        f"\\x{byte:02x}" if byte < 32 or byte >= 127 or byte in b"'\\" else chr(byte) for byte in os.fsencode(word)
    )
    return f"$'{''.join(codes)}'"  # for undecodable bytes and line breaks
