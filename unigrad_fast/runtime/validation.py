"""Checks a tree of values against a typed tree, with uniform messages wherever the values came from.

A message has the dotted key, the value, and the allowed values or the nearest valid key.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterator, Mapping
from decimal import Decimal
from numbers import Number
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, ClassVar, TypeVar, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, ValidationError, field_validator

from unigrad_fast.pipelines import spelling
from unigrad_fast.runtime.errors import DataError, UserError
from unigrad_fast.runtime.trees import BARE


def absolute(path: Path) -> Path:
    """A path made absolute, so that a saved configuration means the same in every working directory."""
    return Path(os.path.abspath(os.path.expanduser(path)))


AbsolutePath = Annotated[Path, AfterValidator(absolute)]


def is_dataset(value: Any) -> bool:
    """Whether a value is a Dataset, such as a list of pictures, and no text, number, path, or group or list of them."""
    if isinstance(value, list | tuple):
        return bool(value) and (isinstance(value[0], Mapping | list | tuple) or is_dataset(value[0]))
    is_plain = value is None or isinstance(value, (str, os.PathLike, Number, Mapping))
    return not is_plain and getattr(value, "ndim", None) != 0


def _named(source: Any) -> Any:
    """A Dataset by the name under which this process remembers it; anything else as it is."""
    if not is_dataset(source):
        return source
    from unigrad_fast.pipelines.items import give

    return give(source)


# Where images come from: a path, or a prefix and a path, as `pipelines/spelling.py` lists them.
ImageSource = Annotated[
    Path, BeforeValidator(_named), AfterValidator(lambda source: Path(spelling.absolute_source(source)))
]


class Node(BaseModel):
    """A group of keys: immutable, without unknown keys, NaN or infinity."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    positional: ClassVar[tuple[str, ...]] = ()  # keys of a command that may be written without the key, if not required

    @field_validator("*", mode="before")
    @classmethod
    def _no_silent_conversion(cls, value: Any, info: Any) -> Any:
        """Prevents silent conversions, and parses what the command line writes as text.

        Booleans must be true or false, and only boolean keys accept them; an empty string is not a path; 0.2,1 is a
        list, a bare switch a boolean, and 1e3 an integer.
        """
        if isinstance(value, str) and _is_list(cls.model_fields[info.field_name].annotation):
            value = value.strip("[]()").split(",")
        if isinstance(value, str) and int in arms(cls.model_fields[info.field_name].annotation):
            value = _whole(value)
        kinds = list(arms(cls.model_fields[info.field_name].annotation))
        if value is BARE and bool in kinds:
            value = True
        if isinstance(value, str) and bool in kinds:
            value = {"true": True, "false": False}.get(value.lower(), value)
        is_wrong = bool not in kinds if isinstance(value, bool) else kinds == [bool]
        if (isinstance(value, str) and not value) or value is BARE or is_wrong:
            raise ValueError("wrong type")
        return value

    @classmethod
    def member(cls, tree: object = None) -> type[Node]:
        """The model for a tree of values, or for any tree; in some groups valid keys depend on the tree's values."""
        return cls


AnyNode = TypeVar("AnyNode", bound=Node)
CLOSE = 0.6  # likeness from which a key is suggested


def _is_list(annotation: Any) -> bool:
    return get_origin(annotation) is tuple or any(get_origin(arm) is tuple for arm in get_args(annotation))


def arms(annotation: Any) -> Iterator[Any]:
    """The alternatives of a type: the members of a union, with Annotated stripped."""
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, UnionType):
        for arm in get_args(annotation):
            yield from arms(arm)
    else:
        yield annotation


def _whole(text: str) -> str | int:
    """The integer written as text like 1e3 or 2.0; other texts unchanged."""
    try:
        number = float(text)
    except ValueError:
        return text
    return int(Decimal(text)) if number.is_integer() and abs(number) < 2**63 else text


def validate(model: type[AnyNode], tree: Mapping[str, Any]) -> AnyNode:
    """Builds `model` from a tree of YAML values or texts; the UserError lists all problems, one per line."""
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        lines = [line for problem in error.errors() for line in _explain(model, tree, problem)]
        raise UserError("\n".join(dict.fromkeys(lines))) from None


def _explain(model: type[Node], tree: Any, problem: Mapping[str, Any]) -> list[str]:
    location, value = problem["loc"], problem["input"]
    if not location:
        return str(problem["ctx"]["error"]).split("\n")
    owner, path = model, []
    for part in location:
        path.append(str(part))
        if part not in owner.model_fields:
            return [_unknown(model, owner, *leaf) for leaf in leaves(value, ".".join(path))]
        tree = tree.get(part) if isinstance(tree, Mapping) else None
        inner = group(owner, part, tree)
        if inner is None:
            break  # the rest of the location names a member of the leaf's union
        owner = inner
    else:
        if isinstance(value, Mapping):  # the group's own messages about its keys
            return [f"{'.'.join(path)}.{line}" for line in str(problem["ctx"]["error"]).split("\n")]
        return [f"{'.'.join(path)} = {shown(value)}: a group; its keys are {', '.join(owner.model_fields)}"]
    if problem["type"] == "missing" and len(path) == len(location):
        description = owner.model_fields[part].description
        return [f"{'.'.join(path)}: missing; {description[0].lower()}{description[1:]}"]
    if isinstance(said := problem.get("ctx", {}).get("error"), DataError):
        return [f"{'.'.join(path)}: {said}"]
    allowed = allowed_values(owner, part)
    if value is BARE:
        return [f"--{'.'.join(path)}: a value is missing; it must be {allowed}"]
    if isinstance(value, list) and _is_list(owner.model_fields[part].annotation):
        value = ",".join(map(str, value))
    close = difflib.get_close_matches(str(value), allowed.removeprefix("one of ").split(", "), n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    return [f"{'.'.join(path)} = {shown(value)}: must be {allowed}{hint}"]


def group(owner: type[Node], key: str, tree: object = None) -> type[Node] | None:
    """The model of the group at a key, or the one that fits a tree there; None for a leaf."""
    annotation = owner.model_fields[key].annotation
    return annotation.member(tree) if isinstance(annotation, type) and issubclass(annotation, Node) else None


def keys(model: type[Node], prefix: str = "") -> Iterator[str]:
    """Every dotted key of a tree."""
    for key in model.model_fields:
        inner = group(model, key)
        if inner is None:
            yield prefix + key
        else:
            yield from keys(inner, f"{prefix}{key}.")


def leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and JSON values of a tree; `key` is the prefix."""
    value = value.model_dump(mode="json") if isinstance(value, Node) else value
    if isinstance(value, Mapping) and value:
        for name, child in value.items():
            yield from leaves(child, f"{key}.{name}" if key else str(name))
    else:
        yield key, value


def _unknown(model: type[Node], owner: type[Node], key: str, value: Any) -> str:
    nearest = _nearest_key(model, key)
    hint = f"did you mean {nearest}?" if nearest else f"valid keys are {', '.join(owner.model_fields)}"
    return f"{key} = {shown(value)}: unknown key; {hint}"


def _nearest_key(model: type[Node], wrong: str) -> str | None:
    wrong_groups, _, wrong_leaf = wrong.rpartition(".")

    def likeness(key: str) -> tuple[float, float, int]:
        groups, _, leaf = key.rpartition(".")
        last = _likeness(wrong_leaf, leaf)
        if wrong_leaf in leaf.split("_"):
            last = max(last, 0.9)
        of_groups = _likeness(wrong_groups, groups)
        return max(_likeness(wrong, key), 0.95 * last), of_groups if of_groups >= CLOSE else 0.0, -len(key)

    best = max(keys(model), key=likeness)
    return best if likeness(best)[0] >= CLOSE else None


def _likeness(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()


def allowed_values(owner: type[Node], key: str) -> str:
    """Range or choices of a leaf, in words."""
    return _in_words(owner.model_json_schema()["properties"][key])


def _in_words(schema: Mapping[str, Any]) -> str:
    if "anyOf" in schema:
        *others, last = (_in_words(option) for option in schema["anyOf"])
        return f"{', '.join(others)} or {last}"
    if "enum" in schema:
        return "one of " + ", ".join(schema["enum"])
    if "const" in schema:
        return str(schema["const"])
    kind = schema.get("format") or schema["type"]
    if kind == "array" and "items" in schema:
        return f"{_in_words(schema['items'])} (or several, comma-separated)"
    if kind == "array":
        return f"{len(schema['prefixItems'])} comma-separated numbers"
    words = {
        "integer": "an integer",
        "number": "a number",
        "boolean": "true or false",
        "path": "a path",
        "string": "a string",
        "null": "null",
    }[kind]
    low, high = schema.get("minimum"), schema.get("maximum")
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    if low is not None and low == high:
        return shown(low)
    limits = [
        f"{word} {shown(limit)}"
        for word, limit in (
            ("of at least" if high is below is None else "from", low),
            ("above", above),
            ("to", high),
            ("below", below),
        )
        if limit is not None
    ]
    return " ".join([words, *limits])


def shown(value: Any) -> str:
    """A value as the user writes it, shortened."""
    if value is BARE:
        text = "true"
    elif isinstance(value, float):
        text = f"{value:g}"
    elif isinstance(value, str):
        text = value or "''"
    else:
        text = json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."
