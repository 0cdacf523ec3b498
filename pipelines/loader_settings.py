"""Checks the settings of loaders, and resolves devices and numbers of threads."""

import os
from numbers import Integral
from os import PathLike

import torch

from .cores import usable_cores
from .cutmix import CutMix
from .errors import DataError
from .manifest import Manifest

TIMEOUT = 60.0  # seconds


def device_number(device: str | torch.device) -> int | None:
    """Index of the GPU; None for the CPU."""
    device = torch.device("cuda" if device == "gpu" else device)
    if device.type == "cpu":
        return None
    if device.type != "cuda":
        raise DataError(f"device {device} cannot decode images; use cpu or cuda")
    return torch.cuda.current_device() if device.index is None else device.index


def thread_count(threads: int | None) -> int:
    """The given number of threads; for None, one less than the cores of this rank, at least one."""
    if threads is not None:
        if threads < 1:
            raise DataError(f"{threads} threads cannot decode images; use at least 1")
        return threads
    return max(1, usable_cores(int(os.environ.get("LOCAL_WORLD_SIZE", 1))) - 1)


def check_types(manifest: object, **integers: object) -> None:
    """Raises `DataError` if `manifest` is not a `Manifest`, or a number is not an integer."""
    if not isinstance(manifest, Manifest):
        root = getattr(manifest, "root", None)  # torchvision's data sets have one
        folder = repr(str(root)) if isinstance(root, (str, PathLike)) else "FOLDER"
        is_dataset = hasattr(manifest, "__getitem__") and root is None and not isinstance(manifest, (str, PathLike))
        use = "open(DATASET)" if is_dataset else f"from_folder({folder})"
        raise DataError(f"a {type(manifest).__name__} is not a Manifest; use Manifest.{use}")
    for name, value in integers.items():
        if not isinstance(value, Integral):
            raise DataError(f"{name} {value!r} is not an integer; use an int")


def check_rank(rank: int, world_size: int) -> None:
    """Raises `DataError` if the rank does not exist."""
    if not 0 <= rank < world_size:
        raise DataError(f"rank {rank} of {world_size} ranks does not exist; use 0 to {world_size - 1}")


def check_division(batch_size: int, accumulation_steps: int, world_size: int) -> None:
    """Raises `DataError` if a batch does not divide evenly over ranks and accumulation steps."""
    parts = accumulation_steps * world_size
    if batch_size > 0 and batch_size % parts == 0:
        return
    low = batch_size // parts * parts
    nearest = f"{low} or {low + parts}" if low > 0 else str(parts)
    over = f"{world_size} ranks" + (f" and {accumulation_steps} accumulation steps" if accumulation_steps > 1 else "")
    raise DataError(f"batch size {batch_size} does not divide over {over}; use {nearest}")


def check_groups(cutmix: CutMix, share: int, views: int) -> None:
    """Raises `DataError` if CutMix cannot be applied to a rank's share of a batch."""
    if views < 2:
        raise DataError(f"CutMix mixes the two global views, and the preset has {views}; choose one with at least two")
    if share % cutmix.group:
        fitting = [group for group in range(2, share + 1) if share % group == 0 and group <= cutmix.group]
        remedy = f"use {fitting[-1]}" if fitting else f"use more than {share} image{'s' if share > 1 else ''} per rank"
        raise DataError(f"a CutMix group of {cutmix.group} does not divide the {share} images per rank; {remedy}")


def too_few(manifest: Manifest, batch_size: int, parts: int) -> str:
    """The message for a manifest that cannot fill a batch."""
    count = len(manifest)
    found = f"{manifest.root}: {count} image{'s' if count > 1 else ''} cannot fill a batch of {batch_size}"
    largest = count // parts * parts
    if largest < 2:
        return f"{found}; use at least {batch_size} images"
    smaller = " or less" if largest > max(parts, 2) else ""
    return f"{found}; use a batch size of {largest}{smaller}, or at least {batch_size} images"
