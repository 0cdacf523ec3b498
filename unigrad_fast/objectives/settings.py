"""What an objective's settings may be."""

from __future__ import annotations

import math
import numbers

import torch


def require_settings(
    width: int,
    balance: float,
    decay: float,
    correlation_source: str,
    compute_dtype: torch.dtype | None,
    most_images: int | None,
    placement: str,
) -> None:
    """Raises TypeError for what is no number, ValueError for what is out of range or unknown."""
    for name, number in (("width", width), ("most_images", most_images)):
        if number is not None and (not isinstance(number, numbers.Integral) or isinstance(number, bool)):
            raise TypeError(f"{name} {number!r} is no whole number; use an int")
    for name, factor in (("balance", balance), ("decay", decay)):
        if not isinstance(factor, numbers.Real) or isinstance(factor, bool):
            raise TypeError(f"{name} {factor!r} is no number; use a float")
    if width < 1:
        raise ValueError(f"width {width} is not a positive number of channels")
    if not 0 <= balance < math.inf:
        raise ValueError(f"balance {balance}: allowed is a finite number from 0 on (100 in the paper)")
    if not 0 <= decay < 1:
        raise ValueError(f"decay {decay} is outside [0, 1); use 0.99 (the paper's)")
    if correlation_source not in ("target", "online"):
        raise ValueError(f"correlation_source {correlation_source!r} is unknown; use 'target' or 'online'")
    if compute_dtype not in (None, torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"compute_dtype {compute_dtype} is unknown; use torch.bfloat16, float16 or float32")
    if most_images is not None and most_images < 1:
        raise ValueError(f"most_images {most_images} is not a positive number of images")
    if placement not in ("replicated", "sharded"):
        raise ValueError(f"placement {placement!r} is unknown; use 'replicated' or 'sharded'")
