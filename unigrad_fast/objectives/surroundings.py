"""What an objective's call finds around itself: autocast, a backward pass, a CUDA graph that is captured."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from unigrad_fast.runtime.torch_private import in_backward


def without_autocast(device: torch.device) -> AbstractContextManager:
    """While inside, nothing is cast."""
    enabled = torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if enabled else nullcontext()


def require_no_recomputation() -> None:
    """Raises RuntimeError in a backward pass."""
    if not torch.compiler.is_compiling() and in_backward():
        raise RuntimeError(
            "activation checkpointing calls UniGrad again in the backward pass, and F would take the batch twice; call "
            "the objective outside of torch.utils.checkpoint (it keeps no more than one array of the embeddings' size)"
        )


def require_no_capture(what: str) -> None:
    """Raises RuntimeError while a CUDA graph is captured: what is made then is the graph's, unset until a replay."""
    if torch.compiler.is_compiling():
        return
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"a CUDA graph is captured before the first step with {what}; make one such step first")
