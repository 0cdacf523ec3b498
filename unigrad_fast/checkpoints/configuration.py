"""The configuration for evaluating and exporting a saved run: the one in its checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from unigrad_fast.checkpoints.files import Reader
from unigrad_fast.config import Config, resolve
from unigrad_fast.runtime.errors import UserError
from unigrad_fast.runtime.trees import is_among, merge
from unigrad_fast.runtime.validation import leaves, shown, validate

# Keys that determine the network, the images and the accuracy.
DECIDING = (
    *("seed", "data.train", "data.val", "data.image_size", "model"),
    *("engine.precision", "engine.tf32", "evaluation.crop_fraction", "evaluation.knn"),
)
# Keys that depend on the machine: RUN/config.yaml may change them.
OF_THE_MACHINE = (
    *("data.decode", "data.threads", "data.read_threads", "data.read_ahead", "data.read_timeout"),
    *("data.max_bad_fraction", "evaluation.batch_size", "engine.device"),
)


def configuration(run: Path, reader: Reader) -> tuple[Config, list[str]]:
    """The checkpoint's configuration, and at most one line for the user about differences in RUN/config.yaml.

    Raises:
        UserError: neither the checkpoint nor RUN/config.yaml has a usable configuration.
    """
    path = run / "config.yaml"
    tree = reader.about.get("config")
    if not tree:
        return resolve(path), []
    config = validate(Config, tree)
    saved = config.model_dump(mode="json")
    try:
        given = _read(path)
    except ValueError as error:
        return config, [f"{path}: {error}; using the configuration in {reader.folder}"]
    before = dict(leaves(saved, ""))
    now = [(key, value) for key, value in leaves(given, "") if key in before and value != before[key]]
    # A run that was imported without images may name them there.
    new = [key for key in (".data.train", ".data.val") if before[key] is None]
    local = {key: value for key, value in now if is_among(key, OF_THE_MACHINE) or key in new}
    told = [
        f"{key[1:]} = {shown(value)} instead of {shown(before[key])}"
        for key, value in now
        if is_among(key, DECIDING) and key not in new
    ]
    if local:
        try:
            config = validate(Config, merge(saved, _nested(local)))
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
        list(leaves(tree, ""))
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror})") from None
    except (ValueError, yaml.YAMLError, RecursionError):
        raise ValueError("is damaged") from None
    if not tree:
        raise ValueError("is empty")
    if not isinstance(tree, dict):
        raise ValueError("is not a tree of keys and values")
    return tree


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """A nested tree from dotted keys, which start with a dot."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *groups, leaf = key[1:].split(".")
        place = tree
        for group in groups:
            place = place.setdefault(group, {})
        place[leaf] = value
    return tree
