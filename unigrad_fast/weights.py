"""The weights of a run in one safetensors file, replaced as a whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from unigrad_fast.errors import UserError

FILE_NAME = "weights.safetensors"


def save_weights(run: Path, branches: dict[str, nn.Module], *, step: int, epoch: float) -> Path:
    """Write RUN/weights.safetensors: keys `<branch>.<parameter or buffer>`, metadata `step` and `epoch`.

    The file is written beside its final name, flushed to the disk and renamed, so that a crash or a full disk leaves
    the previous file as it was.

    Args:
        branches: named modules, such as `online`, `target` and `objective`.
        step: optimizer steps done.
        epoch: passes over the data done.
    """
    tensors = {
        f"{branch}.{name}": tensor.detach().cpu().contiguous()
        for branch, module in branches.items()
        for name, tensor in module.state_dict().items()
    }
    path = run / FILE_NAME
    unfinished = path.with_suffix(".unfinished")
    try:
        save_file(tensors, unfinished, metadata={"step": str(step), "epoch": f"{epoch:g}"})
        with open(unfinished, "rb") as file:
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path


def load_branch(run: Path, branch: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The state dict of one branch (a dotted prefix such as `online.backbone`) and the file's metadata.

    Raises:
        UserError: no such file, or not a readable one.
    """
    path = run / FILE_NAME
    if not path.is_file():
        raise UserError(f"{path}: no such file; the run has not saved weights yet, or {run} is not a run folder")
    prefix = f"{branch}."
    try:
        with safe_open(path, framework="pt") as file:
            names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118
            return {name.removeprefix(prefix): file.get_tensor(name) for name in names}, file.metadata()
    except SafetensorError as error:
        raise UserError(f"{path}: damaged, it cannot be read as safetensors ({error})") from None


def load_encoder(run: Path, backbone: nn.Module) -> dict[str, str]:
    """Load the online backbone of a run strictly into `backbone`; returns the file's metadata."""
    state, metadata = load_branch(run, "online.backbone")
    try:
        backbone.load_state_dict(state, strict=True)
    except RuntimeError as error:
        raise UserError(f"{run / FILE_NAME}: does not fit the run's configuration: {error}") from None
    return metadata
