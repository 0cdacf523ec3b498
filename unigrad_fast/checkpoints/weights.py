"""A saved run, for evaluation and export: one of its checkpoints, the configuration, the weights whole on the CPU."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from unigrad_fast.checkpoints import files
from unigrad_fast.checkpoints.files import Damaged, Reader
from unigrad_fast.config import Config, Scope, resolve, scope_of, to_yaml
from unigrad_fast.runtime import strict_yaml
from unigrad_fast.runtime.errors import UserError
from unigrad_fast.runtime.run_folder import RunFolder
from unigrad_fast.runtime.trees import merge
from unigrad_fast.runtime.validation import leaves, shown, validate

LONGEST = 300  # characters to show of a message from torch


def open_checkpoint(run: Path, step: int | None = None) -> Reader:
    """The checkpoint of a step, or the newest one.

    Raises:
        UserError: the run has no checkpoint, or none of that step, or the description is damaged.
    """
    if step is None:
        with _intact_named(run):
            folder = files.latest(run)
            if folder is not None:
                return Reader(folder)
        raise UserError(f"{run}: no checkpoint there; the run has not saved one yet, or this is not a run folder")
    kept = RunFolder(run).checkpoints_by_step()
    if step not in kept:
        there = ", ".join(map(str, sorted(kept))) or "none"
        raise UserError(f"checkpoint = {step}: no checkpoint of that step in {run}; available: {there}")
    with _intact_named(run):
        return Reader(kept[step])


def write_run(run: Path, config: Config, tensors: Mapping[str, Tensor], step: int = 0, epoch: float = 0) -> Path:
    """Write weights of any origin as a new run, for `evaluate` and `export`; it cannot be resumed.

    Args:
        run: the new folder, which appears completely or not at all.
        config: the backbone (`model`), the images that `evaluate` takes (`data.train` and `data.val`), and the seed.
        tensors: weights on any device: `online.backbone.NAME`, where NAME is torchvision's without `fc`, and if there
            are any `online.projector.NAME` and, of a momentum copy, `target.backbone.NAME`, `target.projector.NAME`.
        step, epoch: how long the weights were trained; names of the results have the epoch.

    Returns:
        The folder.

    Raises:
        UserError: the folder exists.
    """
    if os.path.lexists(run):
        raise UserError(f"run = {run}: exists already; give a new folder")
    unfinished = run.with_name(f".{run.name}.unfinished-{os.getpid()}")
    try:
        unfinished.mkdir(parents=True)
        RunFolder(unfinished).configuration.write_text(to_yaml(config), encoding="utf-8")
        files.write_weights(unfinished, tensors, step, epoch, config.model_dump(mode="json"))
        os.rename(unfinished, run)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return run


@contextmanager
def _intact_named(run: Path) -> Iterator[None]:
    """Inside, an error about a damaged checkpoint also names the newest intact one of the run."""
    try:
        yield
    except Damaged as error:
        remedy = files.remedy(run, lambda it: f"--checkpoint {it.about['step']} takes the newest intact one")
        raise UserError(f"{error}; {remedy}") from None


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
        given = _given(path)
    except ValueError as error:
        return config, [f"{path}: {error}; using the configuration in {reader.folder}"]
    before = dict(leaves(saved))
    now = [(key, value) for key, value in leaves(given) if key in before and value != before[key]]
    # Images may be named there for a run that was imported without any.
    new = [key for key in ("data.train", "data.val") if before[key] is None]
    local = {key: value for key, value in now if Scope.LOCAL in scope_of(key) or key in new}
    told = [
        f"{key} = {shown(value)} instead of {shown(before[key])}"
        for key, value in now
        if Scope.JUDGMENT in scope_of(key) and key not in new
    ]
    for key, value in local.items():
        for part in reversed(key.split(".")):
            value = {part: value}
        saved = merge(saved, value)
    if local:
        try:
            config = validate(Config, saved)
        except UserError as error:
            told.append(str(error).splitlines()[0])
    if not told:
        return config, []
    others = f" and {len(told) - 1} more" if len(told) > 1 else ""
    return config, [f"{path}: has {told[0]}{others}; using the configuration in {reader.folder}"]


def _given(path: Path) -> Mapping[str, Any]:
    """Raises ValueError with a text for the user if the file holds no tree."""
    try:
        tree = strict_yaml.read(path.read_text(encoding="utf-8"))
        list(leaves(tree))
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror})") from None
    except (ValueError, UserError, RecursionError) as error:
        raise ValueError(f"is damaged ({error})") from None
    if not tree:
        raise ValueError("is empty")
    if not isinstance(tree, dict):
        raise ValueError("is not a tree of keys and values")
    return tree


def fingerprint(reader: Reader) -> str:
    """Identifies a checkpoint's content: a run that began again in its folder has other weights at the same step."""
    return "sha256-" + hashlib.sha256(json.dumps(reader.about["files"], sort_keys=True).encode()).hexdigest()[:16]


def load_branch(reader: Reader, branch: str) -> dict[str, Tensor]:
    """The state dict of one branch, a dotted prefix such as `online.backbone`.

    Raises:
        UserError: the checkpoint is damaged.
    """
    with _intact_named(reader.folder.parents[1]):
        reader.verify()
    prefix = f"{branch}."
    return {name.removeprefix(prefix): reader.tensor(name) for name in reader.names if name.startswith(prefix)}


def load_backbone(reader: Reader, backbone: nn.Module) -> None:
    """Load the online backbone strictly into `backbone`."""
    fill(backbone, load_branch(reader, "online.backbone"), reader.folder)


def fill(module: nn.Module, state: Mapping[str, Tensor], source: Path, assign: bool = False) -> None:
    """Load a state dict strictly into a module; `assign` replaces its tensors.

    Raises:
        UserError: names the source, and the first tensor that does not fit.
    """
    try:
        module.load_state_dict(state, strict=True, assign=assign)
    except RuntimeError as error:  # its message has a line for each tensor that does not fit
        first, *others = [line.strip() for line in str(error).splitlines()[1:]]
        more = f" ... and {len(others)} more" if others else ""
        raise UserError(f"{source}: the weights do not fit the configuration: {first[:LONGEST]}{more}") from None
