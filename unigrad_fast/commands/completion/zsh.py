"""The script for zsh, tried in 5.9: one `_arguments` for each command, which knows `--key value` and `--key=value`."""

from __future__ import annotations

import re
from collections.abc import Iterator

from unigrad_fast.commands.completion.words import Argument, Command, filled

_SCRIPT = r"""#compdef unigrad-fast
# Completion of unigrad-fast for zsh, written by `unigrad-fast completion zsh`.

_unigrad-fast_recipes() {
    _alternative 'recipes:recipe:(@RECIPES@)' 'files:YAML file:_files -g "*.(yaml|yml)"'
}

_unigrad-fast() {
    local before=("${(@)words[2,CURRENT-1]}")
    case "$before[1] $before[2] " in
@TABLE@
    esac
}

if [[ $funcstack[1] == _unigrad-fast ]]; then
    _unigrad-fast "$@"
else
    compdef _unigrad-fast unigrad-fast
fi
"""


def script(commands: list[Command]) -> str:
    """The script that completes these commands."""
    return filled(_SCRIPT, map(_entry, commands))


def _entry(command: Command) -> str:
    pattern, length = f"'{command.name} '*" if command.name else "*", len(command.name.split())
    lines = [f"    {pattern})", f"        shift {length} words", f"        (( CURRENT -= {length} ))"]
    return " \\\n            ".join(["\n".join([*lines, "        _arguments"]), *_specifications(command), ";;"])


def _specifications(command: Command) -> Iterator[str]:
    for place, argument, is_rest in command.places():
        yield _quoted(f"{'*' if is_rest else place}:{argument.name}:{_action(argument)}")
    for key in command.keys:
        description = re.sub(r"([\[\]\\])", r"\\\1", key.description)
        if key.kind == "bare":
            yield _quoted(f"--{key.name}[{description}]")
        else:
            colons = "::" if key.kind == "switch" else ":"
            yield _quoted(f"--{key.name}=[{description}]{colons}{key.name}:{_action(key)}")


def _action(argument: Argument) -> str:
    if argument.kind in ("choice", "switch"):
        if any(argument.values.values()):
            described = (rf"{word}\:{_in_quotes(said)}" for word, said in argument.values.items())
            return f"(({' '.join(described)}))"
        return f"({' '.join(argument.values)})"
    listed = f"_values -s , {argument.name} {' '.join(argument.values)}"
    files = {"file": "_files", "folder": "_files -/", "recipe": "_unigrad-fast_recipes", "list": listed}
    return files.get(argument.kind, "")


def _in_quotes(text: str) -> str:
    return '"' + re.sub(r'([\\"$`:])', r"\\\1", text) + '"'


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
