"""The choice between Triton and plain torch, and the precision and device that Triton uses."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

from unigrad_fast.kernels.torch_private import dispatch_modes

INTERPRETED = ("1", "true", "yes", "on", "y")  # values of TRITON_INTERPRET that switch the interpreter on
LEAST_CAPABILITY = (8, 0)  # of a GPU for which Triton compiles
_imagined: tuple[int, int] | None = None  # the compute capability of the GPU whose tensors CPU tensors stand for


@contextmanager
def as_on_cuda(capability: tuple[int, int] = LEAST_CAPABILITY) -> Iterator[None]:
    """A context in which fake CPU tensors take the code paths of a GPU's tensors; nothing can be computed in it."""
    global _imagined
    _imagined = capability
    try:
        yield
    finally:
        _imagined = None


def acts_as_cuda(device: torch.device) -> bool:
    """Whether a device is a GPU or stands for one."""
    return device.type == "cuda" or _imagined is not None


def host_may_read(tensor: Tensor) -> bool:
    """Whether the host can read a tensor's values without waiting for a GPU and without breaking a traced graph."""
    return not acts_as_cuda(tensor.device) and not torch.compiler.is_compiling()


def use_triton(device: torch.device) -> bool:
    """Whether the Triton kernels run on a device.

    Raises:
        ValueError: `UNIGRAD_KERNELS` is neither "triton" nor "torch", or asks for Triton on the CPU without its
            interpreter or on a GPU that it does not support.
    """
    if _imagined is not None:
        return _imagined >= LEAST_CAPABILITY
    choice = os.environ.get("UNIGRAD_KERNELS", "")
    if choice == "":
        return device.type == "cuda" and capability_of(device) >= LEAST_CAPABILITY
    if choice not in ("triton", "torch"):
        raise ValueError(f"UNIGRAD_KERNELS={choice} is unknown; use triton or torch, or unset it")
    interpreted = device.type == "cuda" or os.environ.get("TRITON_INTERPRET", "").lower() in INTERPRETED
    if choice == "triton" and not interpreted:
        raise ValueError(
            "UNIGRAD_KERNELS=triton on the CPU needs Triton's interpreter; set TRITON_INTERPRET=1 before Python starts"
        )
    if choice == "triton" and device.type == "cuda" and capability_of(device) < LEAST_CAPABILITY:
        major, minor = capability_of(device)
        raise ValueError(
            f"UNIGRAD_KERNELS=triton: Triton needs compute capability 8.0, and this GPU has {major}.{minor}; unset it, "
            "and plain torch computes"
        )
    return choice == "triton"


@cache
def capability_of(device: torch.device) -> tuple[int, int]:
    """The compute capability of a GPU."""
    return torch.cuda.get_device_capability(device)


def takes_triton(device: torch.device, *dtypes: torch.dtype) -> bool:
    """Whether the Triton kernels are used for tensors of these dtypes on a device; never for float64.

    Raises:
        ValueError: as in `use_triton`; or bf16 in Triton's interpreter.
    """
    if torch.float64 in dtypes or not use_triton(device):
        return False
    if torch.bfloat16 in dtypes and not acts_as_cuda(device):
        raise ValueError("Triton's interpreter cannot compute bf16; use fp16 or fp32, or UNIGRAD_KERNELS=torch")
    return True


def needs_dispatcher() -> bool:
    """Whether torch has to see an operator: for tracing, for autograd, or because a dispatch mode is active.

    If not, its function may be called directly: the dispatcher takes longer than some launchers.
    """
    return torch.compiler.is_compiling() or torch.is_grad_enabled() or dispatch_modes() > 0


def exact_dtype(*tensors: Tensor) -> torch.dtype:
    """The dtype that tensors are computed in: float64 if one of them is float64, else fp32."""
    for tensor in tensors:
        if tensor.dtype == torch.float64:
            return torch.float64
    return torch.float32


def precision_of(unit: Tensor) -> str:
    """How operands of unit's dtype are multiplied: "tf32" for fp32 if torch allows that for products, else "ieee"."""
    if unit.dtype != torch.float32:
        return "ieee"
    try:
        return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    except RuntimeError:  # set through the other of torch's two interfaces
        return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def on_device_of(tensor: Tensor) -> torch.cuda.device:
    """A context that makes the tensor's device the current one, because Triton launches there."""
    return torch.cuda.device(tensor.device if tensor.is_cuda else -1)
