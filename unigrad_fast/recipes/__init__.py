"""Recipes: the shipped ones, YAML files in this folder, and the user's own; each is read into a tree of values."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from unigrad_fast.objectives import catalogue
from unigrad_fast.runtime import strict_yaml
from unigrad_fast.runtime.errors import UserError
from unigrad_fast.runtime.older_names import renamed
from unigrad_fast.runtime.trees import merge, nested
from unigrad_fast.runtime.validation import absolute, shown

DEFAULT_RECIPE = "imagenet_100ep"
YAML_ENDINGS = (".yaml", ".yml")
SHORT = ("cifar_subset", "quickstart")  # recipes of a thousand steps
BASES = ("imagenet_100ep", "cifar_subset")  # each has a variant BASE_METHOD for every method other than UniGrad


def derived() -> dict[str, tuple[str, str]]:
    """The recipes derived from a base by replacing UniGrad with another method: base and method by name."""
    return {
        f"{base}_{method}": (base, method) for base in BASES for method in catalogue.methods() if method != "unigrad"
    }


def recipe_names() -> list[str]:
    """Names of the shipped recipes: the files, and those derived from them."""
    files = resources.files(__name__).iterdir()
    return sorted([*derived(), *(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml"))])


def load_recipe(name_or_path: str | Path, below: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The tree of a shipped recipe, or of a YAML file merged over the recipe that its key `recipe` names.

    That key names a shipped recipe, or another file, relative to the one that names it. Without the key a file starts
    from the defaults, which are those of `imagenet_100ep`. In the returned tree, `recipe` is the shipped recipe at the
    bottom of the chain.

    Args:
        below: the files that led here by their key `recipe`; the user gave the first of them.
    """
    name = str(name_or_path)
    if name in derived():
        base, method = derived()[name]
        return {**load_recipe(base), "objective": fitted(base, {"method": method}), "recipe": name}
    if name in recipe_names():
        text = (resources.files(__name__) / f"{name}.yaml").read_text(encoding="utf-8")
        return {**_parse_yaml(text, name), "recipe": name}
    path = absolute(Path(name))
    if path in below:
        raise UserError(f"recipe = {below[0]}: recipes refer to each other: {' -> '.join(map(str, (*below, path)))}")
    if os.path.exists(path) and not os.path.isfile(path):
        raise UserError(f"recipe = {name}: is not a text file; give the path of a YAML file")
    if not os.path.isfile(path):
        close = difflib.get_close_matches(name, recipe_names(), n=1)
        raise UserError(
            f"recipe = {name}: no such file or shipped recipe; give the path of a YAML file or one of "
            + ", ".join(recipe_names())
            + (f"; did you mean {close[0]}?" if close else "")
            + (f"; {below[-1]} names it" if below else "")
        )
    try:
        tree = _parse_yaml(path.read_text(encoding="utf-8", errors="surrogateescape"), name)
    except OSError as error:
        raise UserError(f"recipe = {name}: cannot be read as text: {error}") from None
    base = tree.get("recipe", DEFAULT_RECIPE)
    if not isinstance(base, str):
        return tree
    if base not in recipe_names():
        file = path.parent / os.path.expanduser(base)
        if not os.path.isfile(file) and not base.lower().endswith(YAML_ENDINGS):
            return tree
        base = os.fspath(file)
    inherited = load_recipe(base, (*below, path))
    return {**merge(exchanged(inherited, tree), tree), "recipe": inherited.get("recipe", DEFAULT_RECIPE)}


def exchanged(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe `base`, ready to be merged with `top`: if `top` changes the method, with that method's settings.

    Raises:
        UserError: `top` gives a row of another method than `base` names, and not that method.
    """
    own, over = (tree.get("objective") for tree in (base, top))
    own = own if isinstance(own, Mapping) else {}
    if not isinstance(over, Mapping):
        return dict(base)
    if over.get("negative_target") == "stop_gradient" and "correlation_source" in own:  # it implies the source of F
        own = {key: value for key, value in own.items() if key != "correlation_source"}
        base = {**base, "objective": own}
    if not {*catalogue.NAMES} & over.keys():
        return dict(base)
    names = {key: over[key] for key in catalogue.NAMES if isinstance(over.get(key), str)}
    owner = catalogue.rows().get(names.get("row"))
    if owner and "method" not in over and own.get("method", "unigrad") not in ("unigrad", owner):
        raise UserError(
            f"objective.row = {names['row']}: belongs to method {owner}, but the recipe trains {own['method']}; "
            f"add objective.method {owner}, or use one of {', '.join(_recipes_of(owner))}"
        )
    if not {"method", "row"} & names.keys():
        names["method"] = own.get("method") or catalogue.rows().get(own.get("row"), "unigrad")
        if own.get("row") and not {"form", "row"} & over.keys():
            names["row"] = own["row"]
    if catalogue.name_of(names) == catalogue.name_of(own):
        return dict(base)
    return {**base, "objective": fitted(str(base.get("recipe")), names)}


def _recipes_of(method: str) -> list[str]:
    return [name for name, (_, trained) in derived().items() if trained == method] or list(BASES)


def fitted(recipe: str, names: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe's objective settings for a method, form or row."""
    base, _ = derived().get(recipe, (recipe, None))
    form = catalogue.FORMS.get(catalogue.name_of(names))
    return {**names, **(form.short if form and base in SHORT else {})}


def current_names(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A tree of values with renamed keys under their current names."""
    data = tree.get("data")
    return {**tree, "data": renamed(data, "recipe", "preset", "data.")} if isinstance(data, Mapping) else dict(tree)


def title(name_or_path: str | Path) -> str:
    """The name for runs of a recipe: the recipe's name, or its file's name without the ending."""
    name = str(name_or_path)
    return name if name in recipe_names() else Path(name).stem.lstrip(".") or DEFAULT_RECIPE


def _parse_yaml(text: str, name: str) -> dict[str, Any]:
    try:
        tree = strict_yaml.read(text)
    except UserError as error:
        raise UserError(f"recipe = {name}: {error}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise UserError(f"recipe = {name}: holds {shown(tree)}; a recipe must be a tree of keys and values")
    try:
        return current_names(nested(tree))
    except UserError as error:
        raise UserError(f"recipe = {name}: {error}") from None
