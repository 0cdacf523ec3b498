"""What a key of a configuration is for beside the result: said at its field, or at a group for all keys below it."""

from __future__ import annotations

from enum import Flag, auto

from unigrad_fast.runtime.validation import Node, group


class Scope(Flag):
    """Stands in the `Annotated` of a field. A key without any decides the result, and all ranks have the same value."""

    RESULT = 0
    MACHINE = auto()
    """Decides where and how fast, or what is reported: it may change when a run is continued."""
    RANK = auto()
    """Each rank may have its own value."""
    JUDGMENT = auto()
    """Decides what an evaluation finds: the network, the images, the accuracy."""
    LOCAL = auto()
    """Another machine may need another value to evaluate or export a run: RUN/config.yaml may change it."""


def scope_of(model: type[Node], key: str) -> Scope:
    """The scopes of a dotted key, with those of the groups around it.

    A group may also have a mapping from keys in it to their scopes, for fields that are declared elsewhere.
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
