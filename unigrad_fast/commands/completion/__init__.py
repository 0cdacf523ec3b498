"""`unigrad-fast completion`: scripts by which shells complete a word on TAB.

All words are in the scripts, so that a TAB starts no Python.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from unigrad_fast.commands.completion import bash, fish, zsh
from unigrad_fast.commands.completion.words import commands
from unigrad_fast.runtime.validation import Node

WRITERS = {"bash": bash.script, "zsh": zsh.script, "fish": fish.script}


class Completion(Node):
    """Print a script by which a shell completes commands, keys and values."""

    shell: Literal["bash", "zsh", "fish"]
    """Shell. For bash, type `source <(unigrad-fast completion bash)`, also into ~/.bashrc. For zsh, write the script to
    a file _unigrad-fast in a folder of $fpath; for fish, to ~/.config/fish/completions/unigrad-fast.fish."""


def completion(options: Completion, table: Mapping[str, tuple[type[Node], Any]]) -> None:
    print(WRITERS[options.shell](commands(table)), end="")
