"""The arithmetic that the networks compute in."""

from __future__ import annotations

from pathlib import Path

import torch


def has_fast_bf16(device: torch.device) -> bool:
    """Whether the device multiplies bf16 matrices in hardware (on the CPU: AMX, AVX512-BF16, or Arm's BF16)."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    try:
        words = set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
    except OSError:
        return False
    return bool(words & {"amx_bf16", "avx512_bf16", "bf16"})


def autocast_dtype(precision: str, device: torch.device) -> torch.dtype | None:
    """The dtype that the networks compute in under autocast; None is plain fp32.

    Args:
        precision: "bf16", "fp32", or "auto" for bf16 where the hardware has it.
    """
    if precision == "bf16" or (precision == "auto" and has_fast_bf16(device)):
        return torch.bfloat16
    return None
