"""The text of `COMMAND --help`: a command's keys as typed, their meaning and defaults."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from unigrad_fast.runtime.validation import Node, arms, group

_WORDS = {bool: "true|false", int: "INT", float: "FLOAT", str: "STR", Path: "PATH", NoneType: "null", ...: "..."}


def positionals(options: type[Node]) -> dict[str, bool]:
    """Keys whose values may be written without the key, in this order, and whether one takes all words that are left.

    They are the required ones, and those that say so.
    """
    fields = options.model_fields.items()
    return {
        name: get_origin(field.annotation) is tuple
        for name, field in fields
        if field.is_required() or name in options.positional
    }


def text(usage: str, options: type[Node], defaults: Node | None) -> str:
    """The help of a command.

    Args:
        usage: the command with its positional arguments.
        options: its keys.
        defaults: values to show as defaults; None for the keys' own.
    """
    width = max(40, min(120, shutil.get_terminal_size().columns or 80))
    lines = list(_keys(options, defaults, "", width))
    parts = [f"usage: {usage}{' [--key value ...]' if lines else ''}", *_wrapped(str(options.__doc__), width, "")]
    if lines:
        note = (
            "`--key=value` also works. A true|false key without a value means true. If a key is repeated, the last "
            "value wins."
        )
        parts += _wrapped(note, width, "")
    parts.append("")
    for name in positionals(options):
        field = options.model_fields[name]
        parts += [f"  {name.upper()}  ({form(field.annotation)})", *_wrapped(str(field.description), width, " " * 6)]
    return "\n".join([*parts, *lines])


def form(annotation: Any) -> str:
    """The form of a key's value: INT, FLOAT,FLOAT, INT,..., one|other, true|false; null if it may have no value."""
    forms = []
    for arm in sorted(arms(annotation), key=lambda arm: arm is NoneType):
        if get_origin(arm) is tuple:
            forms.append(",".join(_word(kind) for each in get_args(arm) for kind in arms(each)))
        else:
            forms.append(_word(arm))
    return "|".join(forms)


def _word(kind: Any) -> str:
    return "|".join(map(str, get_args(kind))) if get_origin(kind) is Literal else _WORDS[kind]


def _keys(options: type[Node], defaults: Node | None, prefix: str, width: int) -> Iterator[str]:
    """Lines for the keys of a group, followed by those of its subgroups."""
    groups = []
    for name, field in options.model_fields.items():
        if (inner := group(options, name)) is not None:
            groups.append((name, inner, str(field.description)))
        elif prefix or name not in positionals(options):
            default = getattr(defaults, name, field.get_default())
            yield f"  --{prefix}{name} {form(field.annotation)}"
            yield from _wrapped(f"{field.description} (default: {written(default)})", width, " " * 6)
    for name, inner, description in groups:
        yield from _wrapped(f"{prefix}{name}: {description}", width, "")
        below = options.model_fields[name].get_default() if defaults is None else getattr(defaults, name)
        yield from _keys(inner, below, f"{prefix}{name}.", width)


def written(value: Any) -> str:
    """A value as the user would type it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, tuple):
        return ",".join(f"{each:g}" for each in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _wrapped(words: str, width: int, indent: str) -> list[str]:
    wrapped = textwrap.wrap(
        " ".join(words.split()),
        width,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return wrapped if indent else ["", *wrapped]
