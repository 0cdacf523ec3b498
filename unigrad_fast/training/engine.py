"""The DeepSpeed engine around the online branch."""

from __future__ import annotations

import torch
from torch import nn

from unigrad_fast import config
from unigrad_fast.training.deepspeed_import import quiet_deepspeed
from unigrad_fast.training.optimizers import SGD


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
