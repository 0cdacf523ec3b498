"""The context of an objective's call: autocast, a running backward pass, a CUDA graph capture."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from unigrad_fast.runtime.torch_private import in_backward


def without_autocast(device: torch.device) -> AbstractContextManager:
    """A context in which autocast is off."""
    enabled = torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if enabled else nullcontext()


def require_no_recomputation() -> None:
    """Raise RuntimeError if a backward pass is running."""
    if not torch.compiler.is_compiling() and in_backward():
        raise RuntimeError(
            "activation checkpointing calls the objective again in the backward pass, and F would be updated with the "
            "batch twice; call the objective outside of torch.utils.checkpoint (it saves only one tensor the size of "
            "the embeddings for backward)"
        )


def require_no_capture(what: str) -> None:
    """Raise RuntimeError during CUDA graph capture: tensors created then are not filled until the graph is replayed."""
    if torch.compiler.is_compiling():
        return
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"run one training step with {what} before capturing a CUDA graph")
