"""Loads the weights of a run from one of its checkpoints, whole and on the CPU, for evaluation and export."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from unigrad_fast.checkpoints import files
from unigrad_fast.checkpoints.files import Reader
from unigrad_fast.runtime.errors import UserError
from unigrad_fast.runtime.run_folder import RunFolder

LONGEST = 300  # characters to show of a message from torch


def open_checkpoint(run: Path, step: int | None = None) -> Reader:
    """The checkpoint of a step, or the newest one.

    Raises:
        UserError: the run has no checkpoint, or none of that step, or the description is damaged.
    """
    if step is None:
        folder = files.latest(run)
        if folder is None:
            raise UserError(f"{run}: no checkpoint there; the run has not saved one yet, or this is not a run folder")
        return Reader(folder)
    kept = {int(folder.name.removeprefix("step-")): folder for folder in RunFolder(run).complete_checkpoints()}
    if step not in kept:
        there = ", ".join(map(str, sorted(kept))) or "none"
        raise UserError(f"checkpoint = {step}: no checkpoint of that step in {run}; available: {there}")
    return Reader(kept[step])


def fingerprint(reader: Reader) -> str:
    """Identifies a checkpoint's content: a run that began again in its folder has other weights at the same step."""
    return "sha256-" + hashlib.sha256(json.dumps(reader.about["files"], sort_keys=True).encode()).hexdigest()[:16]


def load_branch(reader: Reader, branch: str) -> dict[str, Tensor]:
    """The state dict of one branch, a dotted prefix such as `online.backbone`.

    Raises:
        UserError: the checkpoint is damaged.
    """
    reader.verify()
    prefix = f"{branch}."
    return {name.removeprefix(prefix): reader.tensor(name) for name in reader.names if name.startswith(prefix)}


def load_encoder(reader: Reader, backbone: nn.Module) -> None:
    """Load the online backbone strictly into `backbone`."""
    fill(backbone, load_branch(reader, "online.backbone"), reader.folder)


def fill(module: nn.Module, state: Mapping[str, Tensor], source: Path, assign: bool = False) -> None:
    """Load a state dict strictly into a module; `assign` replaces its tensors.

    Raises:
        UserError: names the source, and the first tensor that does not fit.
    """
    try:
        module.load_state_dict(state, strict=True, assign=assign)
    except RuntimeError as error:  # it has a line for each tensor that does not fit
        first, *others = [line.strip() for line in str(error).splitlines()[1:]]
        more = f" ... and {len(others)} more" if others else ""
        raise UserError(f"{source}: the weights do not fit the configuration: {first[:LONGEST]}{more}") from None
