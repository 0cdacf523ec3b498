"""Unchecked trees of keys and values: parsing them from the command line, and merging them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from unigrad_fast.runtime.errors import UserError


class Bare(int):
    """The value of a switch given without one: true for a boolean key, an error for any other."""


BARE = Bare(True)


def merge(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the values of `top` taking precedence, merged group by group."""
    merged = dict(base)
    for key, value in top.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[str(key)] = merge(merged[key], value) if both else value
    return merged


def nested(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A tree in which dotted keys, at any depth, are groups: {"a.b": 1} as {"a": {"b": 1}}.

    Args:
        prefix: the dotted path of the tree with a trailing dot, for messages.

    Raises:
        UserError: a key is given both ways with different values.
    """
    whole: dict[str, Any] = {}
    for key, value in tree.items():
        name, dot, rest = key.partition(".") if isinstance(key, str) else (key, "", "")
        value = {rest: value} if dot else value
        if isinstance(value, Mapping):
            value = nested(value, f"{prefix}{name}.")
        whole[name] = _joined(whole[name], value, f"{prefix}{name}") if name in whole else value
    return whole


def _joined(one: Any, other: Any, key: str) -> Any:
    """Two values of a key, of which groups are joined key by key."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        common = {name: _joined(one[name], other[name], f"{key}.{name}") for name in one.keys() & other.keys()}
        return {**one, **other, **common}
    if one != other:
        raise UserError(f"{key}: given twice, as {one} and as {other}; give it once")
    return one


def parse_arguments(arguments: Sequence[str], positionals: Mapping[str, bool] | None = None) -> dict[str, Any]:
    """The tree of strings given by `--a.b value` and `--a.b=value`.

    The bare switch `--a.b` becomes `BARE`, `null` None; words without a key are assigned to `positionals` in order,
    and all that are left to one whose value is true, as a list.
    """
    tree: dict[str, Any] = {}
    rest, unnamed, words = list(arguments), list(positionals or {}), []
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or word == "--":
            if not unnamed:
                raise UserError(f"{word}: unexpected argument; options are written --key value")
            if positionals and positionals[unnamed[0]]:
                words.append(word)
                tree[unnamed[0]] = words
            else:
                tree[unnamed.pop(0)] = word
            continue
        key, equals, text = word[2:].partition("=")
        value: str | Bare = text
        if not equals:
            value = rest.pop(0) if rest and not rest[0].startswith("--") else BARE
        *groups, leaf = key.replace("-", "_").split(".")
        place = tree
        for group in groups:
            if not isinstance(place.setdefault(group, {}), dict):
                raise UserError(f"--{key}: {group} was already given a value, but it is a group of keys")
            place = place[group]
        place[leaf] = None if str(value).lower() in ("null", "none") else value
    return tree
