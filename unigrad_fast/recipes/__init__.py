"""Recipes: the shipped ones, which lie here as YAML files, and those of the user, each read into a tree of values."""

from __future__ import annotations

import difflib
import os
from importlib import resources
from pathlib import Path
from typing import Any

from unigrad_fast.runtime import strict_yaml
from unigrad_fast.runtime.errors import UserError
from unigrad_fast.runtime.trees import merge
from unigrad_fast.runtime.validation import absolute, shown

DEFAULT_RECIPE = "imagenet_100ep"


def recipe_names() -> list[str]:
    """Names of the shipped recipes."""
    files = resources.files(__name__).iterdir()
    return sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml"))


def load_recipe(name_or_path: str | Path) -> dict[str, Any]:
    """The tree of a shipped recipe, or of a YAML file over the shipped recipe that its key `recipe` names.

    A YAML file without that key starts from the defaults, which are those of `imagenet_100ep`.
    """
    name = str(name_or_path)
    if name in recipe_names():
        text = (resources.files(__name__) / f"{name}.yaml").read_text(encoding="utf-8")
        return {**_parse_yaml(text, name), "recipe": name}
    path = absolute(Path(name))
    if not os.path.isfile(path):
        close = difflib.get_close_matches(name, recipe_names(), n=1)
        raise UserError(
            f"recipe = {name}: no such file or shipped recipe; allowed is the path of a YAML file or one of "
            + ", ".join(recipe_names())
            + (f"; did you mean {close[0]}?" if close else "")
        )
    try:
        tree = _parse_yaml(path.read_text(encoding="utf-8", errors="surrogateescape"), name)
    except OSError as error:
        raise UserError(f"recipe = {name}: cannot be read as text: {error}") from None
    base = tree.get("recipe", DEFAULT_RECIPE)
    return merge(load_recipe(base), tree) if base in recipe_names() else tree


def _parse_yaml(text: str, name: str) -> dict[str, Any]:
    try:
        tree = strict_yaml.read(text)
    except UserError as error:
        raise UserError(f"recipe = {name}: {error}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise UserError(f"recipe = {name}: holds {shown(tree)}; a recipe is a tree of keys and values")
    return tree
