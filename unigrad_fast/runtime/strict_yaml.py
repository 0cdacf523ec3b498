"""Strict reader for YAML that people write or edit: refuses what the usual reader silently takes in another sense.

That is a repeated key, and the numbers of YAML 1.1 that mean something else to a reader: 010 is 8, and 1:30 is 90.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from unigrad_fast.runtime.errors import UserError

LARGEST = 100_000  # nodes of a tree, counting nodes repeated by aliases each time


def read(text: str) -> Any:
    """The value of a YAML text, which may contain undecodable bytes as `surrogateescape` reads them.

    Raises:
        UserError: names the problem and the line: not valid YAML, a repeated key, an alias inside its own anchor, a
            number in base 8 or 60.
    """
    try:
        return yaml.load(text, _Loader)
    except yaml.reader.ReaderError:
        raise UserError("cannot be read as text: it contains control characters") from None
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or error
        where = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise UserError(f"not valid YAML{where}: {' '.join(str(problem).split())}") from None
    except RecursionError:
        raise UserError("not valid YAML: nested too deeply") from None
    except (ValueError, OverflowError) as error:  # an impossible date or number
        raise UserError(f"not valid YAML: {error}") from None


class _Loader(yaml.SafeLoader):
    NON_PRINTABLE = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\udc80-\udcff\ue000-\ufffd\U00010000-\U0010ffff]")

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._open: list[str] = []  # anchors whose nodes are being read
        self._sizes: dict[int, int] = {}  # by node, the number of nodes in its tree
        self._size = 0

    def compose_node(self, parent: Any, index: Any) -> yaml.Node:
        event = self.peek_event()
        anchor = getattr(event, "anchor", None)
        if isinstance(event, yaml.AliasEvent):
            if anchor in self._open:
                self._refuse(f"alias *{anchor} is inside its own anchor; write the values out", event)
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
            self._refuse(f"more than {LARGEST:,} values, counting those that aliases repeat", event)
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                name, line = (key.tag, key.value), key.start_mark.line + 1
                if name in lines:
                    both = f"lines {lines[name]} and {line}"
                    self._refuse(f"{key.value} is given twice, in {both}; remove one of them", key)
                lines[name] = line
        return node

    def construct_decimal(self, node: yaml.ScalarNode) -> int | float:
        """An integer or a float, unless YAML's value of it differs from the decimal one."""
        is_integer = node.tag == "tag:yaml.org,2002:int"
        value = self.construct_yaml_int(node) if is_integer else self.construct_yaml_float(node)
        for base, pattern in ((60, "[^:]+(:[^:]+)+"), (8, "[-+]?0[0-7_]*[1-7][0-7_]*")):
            if re.fullmatch(pattern, node.value) and (is_integer or base == 60):
                decimal = f", or {int(node.value)}" if base == 8 else ""
                self._refuse(
                    f"YAML reads {node.value} as {value}, in base {base}; write {value}{decimal}, or "
                    f"'{node.value}' in quotes for text",
                    node,
                )
        return value

    def _refuse(self, problem: str, where: Any) -> None:
        raise yaml.composer.ComposerError(None, None, problem, where.start_mark)


for _tag in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_tag}", _Loader.construct_decimal)
