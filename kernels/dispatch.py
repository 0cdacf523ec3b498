"""Who computes, Triton or plain torch, and in which precision and on which device Triton does."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from unigrad_fast.kernels.torch_private import dispatch_modes

INTERPRETED = ("1", "true", "yes", "on", "y")  # values of Triton's variable
_imagined = False  # CPU tensors stand for those of a GPU


@contextmanager
def as_on_cuda() -> Iterator[None]:
    """While inside, fake tensors on the CPU take the ways of tensors on a GPU; nothing can be computed then."""
    global _imagined
    _imagined = True
    try:
        yield
    finally:
        _imagined = False


def acts_as_cuda(device: torch.device) -> bool:
    """Whether a device is a GPU, or stands for one."""
    return device.type == "cuda" or _imagined


def host_may_read(tensor: Tensor) -> bool:
    """Whether reading a tensor's values makes nobody wait, and breaks no graph that is being traced."""
    return not acts_as_cuda(tensor.device) and not torch.compiler.is_compiling()


def use_triton(device: torch.device) -> bool:
    """Whether the Triton kernels run on a device.

    Raises:
        ValueError: `UNIGRAD_KERNELS` is neither "triton" nor "torch", or asks for Triton on the CPU without its
            interpreter.
    """
    if _imagined:
        return True
    choice = os.environ.get("UNIGRAD_KERNELS", "")
    if choice == "":
        return device.type == "cuda"
    if choice not in ("triton", "torch"):
        raise ValueError(f"UNIGRAD_KERNELS={choice} is unknown; use triton or torch, or unset it")
    interpreted = device.type == "cuda" or os.environ.get("TRITON_INTERPRET", "").lower() in INTERPRETED
    if choice == "triton" and not interpreted:
        raise ValueError(
            "UNIGRAD_KERNELS=triton on the CPU needs Triton's interpreter; set TRITON_INTERPRET=1 before Python starts"
        )
    return choice == "triton"


def takes_triton(device: torch.device, *dtypes: torch.dtype) -> bool:
    """Whether the Triton kernels take tensors of these dtypes on a device; float64 they never do.

    Raises:
        ValueError: as `use_triton` does; bf16 in Triton's interpreter.
    """
    if torch.float64 in dtypes or not use_triton(device):
        return False
    if torch.bfloat16 in dtypes and not acts_as_cuda(device):
        raise ValueError("Triton's interpreter cannot compute bf16; use fp16 or fp32, or UNIGRAD_KERNELS=torch")
    return True


def needs_dispatcher() -> bool:
    """Whether torch has to see an operator: it is traced, recorded for autograd, or watched by a mode.

    Else its function may be called past the dispatcher, which takes longer than some launchers do.
    """
    return torch.compiler.is_compiling() or torch.is_grad_enabled() or dispatch_modes() > 0


def exact_dtype(*tensors: Tensor) -> torch.dtype:
    """What tensors are computed in: fp32, or float64 where one of them is."""
    for tensor in tensors:
        if tensor.dtype == torch.float64:
            return torch.float64
    return torch.float32


def precision_of(unit: Tensor) -> str:
    """How operands of unit's dtype are multiplied: "ieee", or "tf32" for fp32 where torch may use it."""
    return float32_precision() if unit.dtype == torch.float32 else "ieee"


def float32_precision() -> str:
    """How fp32 operands are multiplied: "ieee", or "tf32" where torch may use it for matrix products."""
    try:
        return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    except RuntimeError:  # the setting was made by the other of torch's two interfaces
        return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def on_device_of(tensor: Tensor) -> torch.cuda.device:
    """Makes the tensor's device the current one, on which Triton launches."""
    return torch.cuda.device(tensor.device if tensor.is_cuda else -1)
