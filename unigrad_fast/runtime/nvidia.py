"""NVIDIA's cards on this machine: how many torch can use, and where it can use none, why and what to do about it."""

from __future__ import annotations

import os
import re
import warnings
from dataclasses import dataclass
from pathlib import Path

DRIVER = Path("/proc/driver/nvidia")


@dataclass(frozen=True)
class GPUs:
    """What there is.

    Attributes:
        usable: cards that torch can use.
        driver: version of NVIDIA's kernel driver; None where there is none.
        hidden: CUDA_VISIBLE_DEVICES keeps them from this process.
        problem, remedy: why torch can use none though there are some, and what to do about it; else empty.
    """

    usable: int
    driver: str | None
    hidden: bool = False
    problem: str = ""
    remedy: str = ""


def find() -> GPUs:
    """What there is, without touching a card's memory."""
    import torch  # here, for `doctor` says so where it is missing

    driver = driver_version()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        usable = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if usable or driver is None or _drives_none():
        return GPUs(usable, driver)
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return GPUs(0, driver, hidden=True)
    if not torch.version.cuda:
        problem = f"there is a driver ({driver}), but this torch is built for the CPU alone"
        return GPUs(0, driver, problem=problem, remedy="pip install --force-reinstall torch torchvision")
    reason = str(caught[0].message).partition("(Triggered")[0].splitlines()[0] if caught else "torch sees no GPU"
    remedy = (
        "`nvidia-smi` must list the GPUs: ask the scheduler for some (--gpus-per-node), start a container with --gpus "
        "all; CUDA 13 needs driver 580 or newer, CUDA 12 driver 525"
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
    """Whether the driver says that it has no card, as on a machine that only prepares jobs."""
    try:
        return not any((DRIVER / "gpus").iterdir())
    except OSError:
        return False
