"""Commands as functions, made from the table of commands: signature and docstring are those of their options."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol, TypeVar

from unigrad_fast.commands import COMMANDS, checked
from unigrad_fast.interface.results import Result, Table
from unigrad_fast.runtime import command_help, processors
from unigrad_fast.runtime.command_help import positionals
from unigrad_fast.runtime.outputs import Written
from unigrad_fast.runtime.trees import nested
from unigrad_fast.runtime.validation import Node, group, is_dataset

Returned = TypeVar("Returned", covariant=True)


class Function(Protocol[Returned]):
    """A command: what it is about in this order, and its options by name, nested or with dotted keys."""

    def __call__(self, *about: Any, **options: Any) -> Returned: ...


def function_of(command: str) -> Function[Any]:
    """A command as a function, which returns what it has written as a Result, or its rows as a Table."""
    options = COMMANDS[command][0]
    name = command.replace(" ", ".")

    def function(*about: Any, **given: Any) -> Result | Table:
        made = called(command, {**placed(name, options, about, given), **given})
        return Result(made) if isinstance(made, Written) else Table(made)

    function.__name__ = function.__qualname__ = command.split()[-1]
    function.__doc__ = described(options)
    function.__signature__ = inspect.Signature(parameters(options))  # type: ignore[attr-defined]
    return function


def called(command: str, given: Mapping[str, Any], *further: Any) -> Any:
    """What a command returns. Raises UserError unless its options can work.

    Args:
        given: options, nested or with dotted keys.
        further: what the command takes besides.
    """
    processors.begin()
    options = checked(command, nested(plain(given)))
    with in_a_callers_process():
        return COMMANDS[command][1](options, *further)


@contextmanager
def in_a_callers_process() -> Iterator[None]:
    """Inside, signals raise errors in place of ending the process, unless a launcher started it as one of several.

    Afterwards errors are shown as before; torch would go on naming the rank in each.
    """
    from unigrad_fast.runtime.preemption import raising
    from unigrad_fast.runtime.process_group import launch_environment

    with ExitStack() as stack:
        stack.callback(setattr, sys, "excepthook", sys.excepthook)
        if launch_environment(os.environ).size == 1:
            stack.enter_context(raising())
        yield


def placed(name: str, options: type[Node], about: Sequence[Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Positional arguments by the keys whose values they are. Raises TypeError as Python does for its functions."""
    several = positionals(options)
    keys, values = list(several), list(about)
    if keys and several[keys[-1]] and len(values) >= len(keys):
        rest = values[len(keys) - 1 :]
        is_listed = len(rest) == 1 and isinstance(rest[0], list | tuple)
        values[len(keys) - 1 :] = [list(rest[0]) if is_listed else rest]
    if len(values) > len(keys):
        raise TypeError(
            f"{name}() takes at most {len(keys)} positional arguments, {', '.join(keys)}; {len(values)} given"
        )
    taken = dict(zip(keys, values, strict=False))
    if twice := [key for key in taken if key in given]:
        raise TypeError(f"{name}() got multiple values for {twice[0]}")
    return taken


def plain(value: Any) -> Any:
    """Paths of any kind as text and NumPy's numbers as Python's, in a tree of values; Datasets as they are."""
    if is_dataset(value):
        return value
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value.item() if hasattr(value, "item") else value


def parameters(options: type[Node], first: Sequence[inspect.Parameter] = ()) -> list[inspect.Parameter]:
    """Parameters of a function that takes options."""
    several = positionals(options)
    kind = inspect.Parameter
    places = [
        kind(key, kind.VAR_POSITIONAL)
        if is_several
        else kind(key, kind.POSITIONAL_OR_KEYWORD, default=_default(options, key))
        for key, is_several in several.items()
    ]
    named = [key for key in options.model_fields if key not in several]
    return [*places, *first, *(kind(key, kind.KEYWORD_ONLY, default=_default(options, key)) for key in named)]


def _default(options: type[Node], key: str) -> Any:
    field = options.model_fields[key]
    if field.is_required():
        return inspect.Parameter.empty
    return {} if group(options, key) else field.get_default()


def described(options: type[Node]) -> str:
    """The docstring of a function that takes options."""
    lines = []
    for key, field in options.model_fields.items():
        inner = group(options, key)
        form = command_help.form(field.annotation) if inner is None else "keys " + ", ".join(inner.model_fields)
        lines.append(f"    {key}: {field.description} ({form})")
    return "\n".join([f"{options.__doc__}", "", "Args:", *lines]).replace("null", "None").replace("true|false", "bool")
