"""Precision of the networks' arithmetic, and torch's process-wide settings for it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.utils.deterministic


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
        precision: "bf16", "fp16", "fp32", or "auto": bf16 where the hardware has it, else fp16 on a GPU (compute
            capability below 8.0) and fp32 on a CPU.
    """
    if precision == "auto":
        slower = "fp16" if device.type == "cuda" else "fp32"
        precision = "bf16" if has_fast_bf16(device) else slower
    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": None}[precision]


@contextmanager
def tensor_float32(allowed: bool) -> Iterator[None]:
    """Inside, CUDA's fp32 matrix products and convolutions use TF32 only if allowed, whatever was set before.

    torch's default is TF32 for convolutions but not for matrix products.
    """
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    settings = (matmul, cudnn.conv, cudnn.rnn)
    before = [each.fp32_precision for each in settings]
    try:
        # torch's older interface has separate settings, and reading them raises an error if they contradict the newer
        # ones. If they do already, they stay as they are.
        older = (torch.get_float32_matmul_precision(), cudnn.allow_tf32)
    except RuntimeError:
        older = None
    try:
        if older is not None:
            matmul.allow_tf32 = cudnn.allow_tf32 = allowed
        for each in settings:
            each.fp32_precision = "tf32" if allowed else "ieee"
        yield
    finally:
        if older is not None:
            products, cudnn.allow_tf32 = older
            matmul.allow_tf32 = products != "highest"
            if products == "medium":
                torch.set_float32_matmul_precision(products)
        for each, value in zip(settings, before, strict=True):
            each.fp32_precision = value


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Inside, if `wanted`, torch uses only algorithms whose results repeat bit for bit.

    Enter before the first matrix product on a GPU, because cuBLAS reads its environment variable then. An operation
    without such an algorithm raises a RuntimeError that names it.
    """
    if not wanted:
        yield
        return
    fill, cudnn, variable = torch.utils.deterministic, torch.backends.cudnn, "CUBLAS_WORKSPACE_CONFIG"
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled, chosen, workspace = fill.fill_uninitialized_memory, cudnn.deterministic, os.environ.get(variable)
    try:
        torch.use_deterministic_algorithms(True)
        fill.fill_uninitialized_memory = False  # a debugging aid that takes time
        cudnn.deterministic = True
        os.environ[variable] = workspace or ":4096:8"
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        fill.fill_uninitialized_memory, cudnn.deterministic = filled, chosen
        if workspace is None:
            os.environ.pop(variable, None)


@contextmanager
def fastest_convolutions(device: torch.device) -> Iterator[None]:
    """Inside, cuDNN benchmarks its algorithms for each new shape and keeps the fastest; on a GPU only.

    Not if torch is deterministic, because the fastest algorithm may differ from run to run.
    """
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark
    if device.type == "cuda" and not (cudnn.deterministic or torch.are_deterministic_algorithms_enabled()):
        cudnn.benchmark = True
    try:
        yield
    finally:
        cudnn.benchmark = before
