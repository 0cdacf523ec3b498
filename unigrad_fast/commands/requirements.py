"""What a command needs before it begins: a run, libraries that the user chooses, a folder with a name."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path

from unigrad_fast.config import holds_run
from unigrad_fast.runtime.errors import UserError


def require_run(folder: Path) -> None:
    """Raises UserError unless a folder holds a run."""
    if not holds_run(folder):
        raise UserError(f"run = {folder}: no run there (no config.yaml); give a folder that pretrain wrote")


def require_named_output(environ: Mapping[str, str]) -> None:
    """Raises UserError where a launcher starts a command again, which then must find the run it began."""
    for variable, whose in (("TORCHELASTIC_MAX_RESTARTS", "torchrun"), ("SLURM_RESTART_COUNT", "SLURM")):
        if int(environ.get(variable, "0")) > 0:
            raise UserError(
                f"output = null: {whose} starts this command again ({variable} is {environ[variable]}), and a free "
                "folder would be another one each time; give --output FOLDER"
            )


def require_dali() -> None:
    """Raises UserError when DALI, which the user chooses by CUDA version, is not installed."""
    if importlib.util.find_spec("nvidia") is None or importlib.util.find_spec("nvidia.dali") is None:
        raise UserError(
            "DALI, which decodes the images, is not installed; type `pip install nvidia-dali-cuda130`, or "
            "`nvidia-dali-cuda120` beside a torch for CUDA 12 (without a GPU either will do)"
        )


def require_triton() -> None:
    """Raises UserError when Triton, which torch brings along on Linux only, is not installed."""
    if importlib.util.find_spec("triton") is None:
        raise UserError("Triton, which compiles the kernels, is not installed; type `pip install triton`")
