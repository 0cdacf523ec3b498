"""Tables of all keys of the configuration, generated from the tree in `unigrad_fast/config.py`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from unigrad_fast.config import Config
from unigrad_fast.runtime.command_help import written
from unigrad_fast.runtime.validation import Node, allowed_values, group

# Words in brackets that name where a default comes from.
SOURCE = re.compile(r" ?\(((?:[^()]*\b)?(?:paper|code|ours|advice|protocol|default)\b[^()]*)\)")
NOTE = "\nDefaults without a source are our choice."


def keys_of_every_group() -> str:
    """A heading and a table per group."""
    return "\n".join([NOTE, *_group(Config, "", "Keys without a group.")])


def _group(options: type[Node], prefix: str, about: str) -> Iterator[str]:
    rows, groups = [], []
    for name, field in options.model_fields.items():
        description = " ".join(str(field.description).split())
        if (inner := group(options, name)) is not None:
            groups.append((inner, f"{prefix}{name}.", description))
        else:
            meaning, source = _parted(description)
            cells = (
                f"`{prefix}{name}`",
                meaning,
                allowed_values(options, name),
                f"`{written(field.get_default())}`",
                source,
            )
            rows.append(f"| {' | '.join(_cell(cell) for cell in cells)} |")
    if rows:
        title = f"`{prefix.rstrip('.')}`" if prefix else "Top"
        yield f"\n### {title}\n\n{about}\n"
        yield "| key | meaning | allowed | default | source of the default |\n| --- | --- | --- | --- | --- |"
        yield from rows
    for inner in groups:
        yield from _group(*inner)


def _parted(description: str) -> tuple[str, str]:
    """The meaning of a key, and the source of its default; with several sources the meaning keeps them too."""
    sources = SOURCE.findall(description)
    if len(sources) > 1:
        return description, "; ".join(dict.fromkeys(sources))
    return SOURCE.sub("", description), "".join(sources)


def _cell(text: Any) -> str:
    return str(text).replace("|", "\\|").replace("<", "&lt;")
