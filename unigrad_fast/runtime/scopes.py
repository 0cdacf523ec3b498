"""Scopes of configuration keys: what a key affects. Declared at a field, or at a group for all keys below it."""

from __future__ import annotations

from enum import Flag, auto

from unigrad_fast.runtime.validation import Node, group


class Scope(Flag):
    """Given in a field's `Annotated`. A key without a scope decides the result and is the same on all ranks."""

    RESULT = 0
    MACHINE = auto()
    """Decides where and how fast a run computes, or what it reports: it may change when a run is resumed."""
    RANK = auto()
    """Each rank may have its own value."""
    JUDGMENT = auto()
    """Decides the outcome of an evaluation: the network, the images, the accuracy."""
    LOCAL = auto()
    """Evaluating or exporting a run on another machine may need another value: it may be changed in RUN/config.yaml."""


def scope_of(model: type[Node], key: str) -> Scope:
    """The scopes of a dotted key, including those of the groups around it.

    A group may also map keys in it to scopes, for fields that are declared elsewhere.
    """
    scope, owner, declared = Scope.RESULT, model, {}
    for part in key.split("."):
        scope |= declared.get(part, Scope.RESULT)
        if owner is None or part not in owner.model_fields:
            break
        said = owner.model_fields[part].metadata
        for each in said:
            scope |= each if isinstance(each, Scope) else Scope.RESULT
        declared = next((each for each in said if isinstance(each, dict)), {})
        owner = group(owner, part)
    return scope
