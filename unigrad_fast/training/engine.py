"""The DeepSpeed engine around the online branch."""

from __future__ import annotations

import torch
from torch import nn

from unigrad_fast import config
from unigrad_fast.optimization.gated import Gated
from unigrad_fast.runtime.quiet import quiet_deepspeed
from unigrad_fast.training import deepspeed_private

BUCKET = 50_000_000  # elements that DeepSpeed reduces or gathers per call; its default of 5e8 takes 1.9 GiB of fp32


def build_engine(
    module: nn.Module,
    optimizer: Gated,
    *,
    settings: config.Engine,
    micro_batch_size: int,
    dtype: torch.dtype | None,
    verbose: bool = False,
):
    """A DeepSpeed engine for the online encoder; the process group must exist.

    Afterwards parameters are the same on all ranks; at ZeRO stage 0 they are channels-last, and the engine does not
    reduce gradients (see `reduction`).

    Args:
        module: the online encoder, contiguous, on its device.
        micro_batch_size: images per rank and micro-batch.
        dtype: autocast's dtype, None for fp32. Gradients are reduced in fp32 either way.
    """
    deepspeed = quiet_deepspeed(verbose)
    sharding = {
        "stage": settings.zero_stage,
        "reduce_bucket_size": BUCKET,
        "allgather_bucket_size": BUCKET,
        "compute_grad_norm": False,  # the optimizer computes it on the device; DeepSpeed's would sync in every step
    }
    engine, _, _, _ = deepspeed.initialize(
        model=module,
        optimizer=optimizer,
        config={
            "train_micro_batch_size_per_gpu": micro_batch_size,
            "gradient_accumulation_steps": settings.accumulation_steps,
            "gradient_clipping": 0.0,  # clipping is the optimizer's; DeepSpeed's default is 1.0
            "zero_optimization": sharding if settings.zero_stage else {"stage": 0},
            "zero_allow_untested_optimizer": True,
            "timers": {"throughput": {"enabled": False}},  # on by default, which synchronises in every step
            # Without the empty list, gradients of linear layers and convolutions would be reduced in bf16.
            "torch_autocast": {"enabled": dtype is not None, "dtype": "bfloat16", "lower_precision_safe_modules": []},
        },
    )
    # Told that it is fp16, DeepSpeed would add torch's loss scaler, for which the host waits in every step.
    deepspeed_private.compute_in(engine, dtype)
    if settings.zero_stage == 0:
        # Only now, because DeepSpeed's broadcast of the parameters takes only contiguous tensors. At the other stages
        # they are slices of one flat tensor, and only the channels-last input decides the activations' layout.
        engine.module.to(memory_format=torch.channels_last)
        # `reduction` does it during backward; DeepSpeed would copy all gradients into a buffer and back.
        engine.enable_backward_allreduce = False
    return engine
