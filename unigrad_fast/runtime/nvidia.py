"""NVIDIA GPUs on this machine: how many torch can use; if none, why, and the remedy."""

from __future__ import annotations

import os
import re
import warnings
from dataclasses import dataclass
from pathlib import Path

DRIVER = Path("/proc/driver/nvidia")


@dataclass(frozen=True)
class GPUs:
    """The GPUs that were found.

    Attributes:
        usable: number of GPUs that torch can use.
        driver: version of NVIDIA's kernel driver; None without a driver.
        hidden: CUDA_VISIBLE_DEVICES hides them from this process.
        problem, remedy: why torch can use none although there are some, and what to do; otherwise empty.
    """

    usable: int
    driver: str | None
    hidden: bool = False
    problem: str = ""
    remedy: str = ""


def find() -> GPUs:
    """The GPUs, found without allocating memory on them."""
    import torch  # here, so that `doctor` can report it missing

    driver = driver_version()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        usable = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if usable or driver is None or _drives_none():
        return GPUs(usable, driver)
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return GPUs(0, driver, hidden=True)
    if not torch.version.cuda:
        problem = f"there is a driver ({driver}), but this torch is built for the CPU only"
        return GPUs(0, driver, problem=problem, remedy="pip install --force-reinstall torch torchvision")
    reason = str(caught[0].message).partition("(Triggered")[0].splitlines()[0] if caught else "torch sees no GPU"
    remedy = (
        "`nvidia-smi` must list the GPUs: request some from the scheduler (--gpus-per-node), or start the container "
        "with --gpus all; CUDA 13 needs driver 580 or newer, CUDA 12 driver 525"
    )
    return GPUs(0, driver, problem=f"driver {driver}, but: {reason.strip()}", remedy=remedy)


def driver_version() -> str | None:
    """Version of NVIDIA's kernel driver."""
    try:
        text = (DRIVER / "version").read_text(encoding="utf-8")
    except OSError:
        return None
    match = re.search(r"Module.*?\s(\d+\.[\d.]+)", text)
    return match[1] if match else "unknown"


def _drives_none() -> bool:
    """Whether the driver reports no GPU, as on a login node."""
    try:
        return not any((DRIVER / "gpus").iterdir())
    except OSError:
        return False
