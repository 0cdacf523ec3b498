"""The weights of a run, from its newest checkpoint, whole and on the CPU: for evaluation and export."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor, nn

from unigrad_fast.checkpoints import files
from unigrad_fast.runtime.errors import UserError


def load_branch(run: Path, branch: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The state dict of one branch (a dotted prefix such as `online.backbone`), and the `step` and `epoch` it is of.

    Raises:
        UserError: the run has no checkpoint, or its newest one is damaged.
    """
    folder = files.latest(run)
    if folder is None:
        raise UserError(f"{run}: no checkpoint there; the run has not saved one yet, or this is not a run folder")
    reader = files.Reader(folder)
    reader.verify()
    prefix = f"{branch}."
    state = {name.removeprefix(prefix): reader.tensor(name) for name in reader.names if name.startswith(prefix)}
    return state, {"step": str(reader.about["step"]), "epoch": f"{reader.about['epoch']:g}"}


def load_encoder(run: Path, backbone: nn.Module) -> dict[str, str]:
    """Load the online backbone of a run strictly into `backbone`; returns the `step` and `epoch` it is of."""
    state, metadata = load_branch(run, "online.backbone")
    try:
        backbone.load_state_dict(state, strict=True)
    except RuntimeError as error:
        raise UserError(f"{run}: its checkpoint does not fit its configuration: {error}") from None
    return metadata
