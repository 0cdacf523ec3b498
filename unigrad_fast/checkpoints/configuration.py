"""The configuration for evaluating and exporting a saved run: the one in its checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from unigrad_fast.checkpoints.files import Reader
from unigrad_fast.config import Config, resolve
from unigrad_fast.runtime.errors import UserError
from unigrad_fast.runtime.run_folder import RunFolder
from unigrad_fast.runtime.scopes import Scope, scope_of
from unigrad_fast.runtime.trees import merge
from unigrad_fast.runtime.validation import leaves, shown, validate


def configuration(run: Path, reader: Reader) -> tuple[Config, list[str]]:
    """The checkpoint's configuration, and at most one line for the user about differences in RUN/config.yaml.

    Raises:
        UserError: neither the checkpoint nor RUN/config.yaml has a usable configuration.
    """
    path = RunFolder(run).configuration
    tree = reader.about.get("config")
    if not tree:
        return resolve(path), []
    config = validate(Config, tree)
    saved = config.model_dump(mode="json")
    try:
        given = _read(path)
    except ValueError as error:
        return config, [f"{path}: {error}; using the configuration in {reader.folder}"]
    before = dict(leaves(saved))
    now = [(key, value) for key, value in leaves(given) if key in before and value != before[key]]
    # Images may be named there for a run that was imported without any.
    new = [key for key in ("data.train", "data.val") if before[key] is None]
    local = {key: value for key, value in now if Scope.LOCAL in scope_of(Config, key) or key in new}
    told = [
        f"{key} = {shown(value)} instead of {shown(before[key])}"
        for key, value in now
        if Scope.JUDGMENT in scope_of(Config, key) and key not in new
    ]
    changed: Mapping[str, Any] = saved
    for key, value in local.items():
        for part in reversed(key.split(".")):
            value = {part: value}
        changed = merge(changed, value)
    if local:
        try:
            config = validate(Config, changed)
        except UserError as error:
            told.append(str(error).splitlines()[0])
    if not told:
        return config, []
    others = f" and {len(told) - 1} more" if len(told) > 1 else ""
    return config, [f"{path}: has {told[0]}{others}; using the configuration in {reader.folder}"]


def _read(path: Path) -> Mapping[str, Any]:
    """Raises ValueError with a text for the user if the file holds no tree."""
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
        list(leaves(tree))
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror})") from None
    except (ValueError, yaml.YAMLError, RecursionError):
        raise ValueError("is damaged") from None
    if not tree:
        raise ValueError("is empty")
    if not isinstance(tree, dict):
        raise ValueError("is not a tree of keys and values")
    return tree
