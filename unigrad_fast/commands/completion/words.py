"""What may stand at each place of the command line, from the tree that `--help` shows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from unigrad_fast.pipelines.presets import PRESETS
from unigrad_fast.recipes import recipe_names
from unigrad_fast.runtime.command_help import positionals
from unigrad_fast.runtime.validation import Node, arms, group

FOLDERS = ("run", "runs", "folder")  # paths by these names are folders, others may be files

Kind = Literal["bare", "text", "choice", "switch", "list", "file", "folder", "recipe"]


@dataclass(frozen=True)
class Argument:
    """A key or a positional argument, and what completes its value.

    A `bare` key has no value, a `switch` works with and without; nothing completes `text`; a `list` has commas.
    """

    name: str
    description: str
    kind: Kind
    values: Mapping[str, str] = field(default_factory=dict)
    """With their descriptions, which may be empty."""


@dataclass(frozen=True)
class Command:
    """What may follow a command, a group of commands, or `unigrad-fast` alone (without a name)."""

    name: str
    positional: tuple[Argument, ...]
    takes_rest: bool
    """The last positional argument takes all words that are left."""
    keys: tuple[Argument, ...]

    def places(self) -> Iterator[tuple[int, Argument, bool]]:
        """The positional arguments, counted from 1, and whether one takes all words that are left."""
        for place, argument in enumerate(self.positional, 1):
            yield place, argument, self.takes_rest and place == len(self.positional)


HELP = Argument("help", "Show the keys.", "bare")
VERSION = Argument("version", "Show the version.", "bare")


def commands(table: Mapping[str, tuple[type[Node], Any]]) -> list[Command]:
    """The commands of such a table as `unigrad_fast.commands.COMMANDS`, then their groups, then `unigrad-fast`."""
    found = [_command(name, options) for name, (options, _) in table.items()]
    groups: dict[str, dict[str, str]] = {}
    for name, (options, _) in table.items():
        *above, word = name.split()
        groups.setdefault(" ".join(above), {})[word] = _line(options.__doc__)
    first = {name.split()[0]: ", ".join(groups.get(name.split()[0], ())) for name in table} | groups.pop("")
    found += [_group(name, words, (HELP,)) for name, words in groups.items()]
    return [*found, _group("", first, (HELP, VERSION))]


def filled(script: str, table: Iterable[str]) -> str:
    """A shell's script with the lines of its table, and the names of the recipes, in their places."""
    return script.replace("@TABLE@", "\n".join(table)).replace("@RECIPES@", " ".join(recipe_names()))


def _group(name: str, words: Mapping[str, str], keys: tuple[Argument, ...]) -> Command:
    return Command(name, (Argument("command", "", "choice", words),), False, keys)


def _command(name: str, options: type[Node]) -> Command:
    unnamed, every = positionals(options), {argument.name: argument for argument in _arguments(options)}
    positional = tuple(every.pop(argument) for argument in unnamed)
    return Command(name, positional, any(unnamed.values()), (*every.values(), HELP))


def _arguments(options: type[Node], prefix: str = "") -> Iterator[Argument]:
    for name, leaf in options.model_fields.items():
        if inner := group(options, name):
            yield from _arguments(inner, f"{prefix}{name}.")
        else:
            kind, values = _completed(name, leaf.annotation)
            yield Argument(prefix + name, _line(leaf.description), kind, dict.fromkeys(values, ""))


def _completed(name: str, annotation: Any) -> tuple[Kind, list[str]]:
    kinds = list(arms(annotation))
    items = [item for kind in kinds if get_origin(kind) is tuple for each in get_args(kind) for item in arms(each)]
    if Path in (*kinds, *items):
        return ("folder" if name in FOLDERS else "file"), []
    if name == "recipe":
        return "recipe", recipe_names()
    choices = [*PRESETS] if name == "preset" and str in kinds else [word for kind in kinds for word in _words(kind)]
    if choices:
        return ("switch" if kinds == [bool] else "choice"), choices + ["null"] * (NoneType in kinds)
    listed = [word for item in items for word in _words(item)]
    return ("list" if listed else "text"), listed


def _words(kind: Any) -> tuple[str, ...]:
    if kind is bool:
        return "true", "false"
    return get_args(kind) if get_origin(kind) is Literal else ()


def _line(text: str | None) -> str:
    return " ".join(str(text).split())
