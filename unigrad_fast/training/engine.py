"""The DeepSpeed engine around the online branch, and the precision it computes in."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from unigrad_fast import config
from unigrad_fast.training.deepspeed_import import quiet_deepspeed
from unigrad_fast.training.optimizers import SGD


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
    """The dtype that the networks compute in under autocast; None is plain fp32."""
    if precision == "bf16" or (precision == "auto" and has_fast_bf16(device)):
        return torch.bfloat16
    return None


def build_engine(
    module: nn.Module,
    optimizer: SGD,
    *,
    settings: config.Engine,
    micro_batch_size: int,
    dtype: torch.dtype | None,
    verbose: bool = False,
):
    """A DeepSpeed engine for the online encoder; the process group must exist.

    Parameters are the same on all ranks afterwards, and lie channels-last.

    Args:
        module: the online encoder, contiguous, on its device.
        micro_batch_size: images per rank and micro-batch.
        dtype: of autocast, None for fp32. Gradients are reduced in fp32 either way.
    """
    deepspeed = quiet_deepspeed(verbose)
    engine, _, _, _ = deepspeed.initialize(
        model=module,
        optimizer=optimizer,
        config={
            "train_micro_batch_size_per_gpu": micro_batch_size,
            "gradient_accumulation_steps": settings.accumulation_steps,
            "gradient_clipping": 0.0,  # clipping is the optimizer's; DeepSpeed's default is 1.0
            "zero_optimization": {"stage": settings.zero_stage},
            "timers": {"throughput": {"enabled": False}},  # its default synchronises the device in every step
            "torch_autocast": {"enabled": dtype is not None, "dtype": "bfloat16"},
        },
    )
    # Only now: DeepSpeed's broadcast of the parameters takes contiguous tensors alone.
    engine.module.to(memory_format=torch.channels_last)
    return engine
