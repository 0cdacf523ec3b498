"""YAML as people write it by hand: what a plain reader would pass over, a key that stands twice, is a mistake."""

from __future__ import annotations

import re
from typing import Any

import yaml

from unigrad_fast.runtime.errors import UserError

LARGEST = 100_000  # nodes of a tree, those that aliases repeat counted each time


def read(text: str) -> Any:
    """The value of a YAML text; bytes that are no UTF-8 may stand in it as `surrogateescape` reads them.

    Raises:
        UserError: what is wrong, and in which line: no YAML, a key twice, an alias within what it stands for.
    """
    try:
        return yaml.load(text, _Loader)
    except yaml.reader.ReaderError:
        raise UserError("cannot be read as text: it has characters that no text has") from None
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or error
        where = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise UserError(f"not valid YAML{where}: {' '.join(str(problem).split())}") from None
    except RecursionError:
        raise UserError("not valid YAML: nested too deeply") from None
    except (ValueError, OverflowError) as error:  # of a date or number that cannot be
        raise UserError(f"not valid YAML: {error}") from None


class _Loader(yaml.SafeLoader):
    NON_PRINTABLE = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\udc80-\udcff\ue000-\ufffd\U00010000-\U0010ffff]")

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._open: list[str] = []  # anchors of what is being read
        self._sizes: dict[int, int] = {}  # of nodes, in nodes
        self._size = 0

    def compose_node(self, parent: Any, index: Any) -> yaml.Node:
        event = self.peek_event()
        anchor = getattr(event, "anchor", None)
        if isinstance(event, yaml.AliasEvent):
            if anchor in self._open:
                self._refuse(f"*{anchor} stands within what it stands for; write it out", event)
            node = super().compose_node(parent, index)
            self._size += self._sizes.get(id(node), 1)
        else:
            before = self._size
            self._open.append(anchor)
            node = super().compose_node(parent, index)
            self._open.pop()
            self._size += 1
            self._sizes[id(node)] = self._size - before
        if self._size > LARGEST:
            self._refuse(f"more than {LARGEST:,} values, with what aliases repeat", event)
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                name, line = (key.tag, key.value), key.start_mark.line + 1
                if name in lines:
                    both = f"lines {lines[name]} and {line}"
                    self._refuse(f"{key.value} stands twice, in {both}; leave one of them out", key)
                lines[name] = line
        return node

    def _refuse(self, problem: str, where: Any) -> None:
        raise yaml.composer.ComposerError(None, None, problem, where.start_mark)
