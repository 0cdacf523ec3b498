"""The operators of batch norm by groups; `batch_norm_reference` describes them.

As in `ops`, they run the Triton kernels of `batch_norm` on CUDA, and plain torch elsewhere and in float64.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from . import batch_norm_reference as reference
from .declaration import Operator
from .dispatch import needs_dispatcher, on_device_of, takes_triton

statistics = Operator(
    "batch_norm_statistics",
    reference.statistics,
    kernel="batch_norm",
    fake=lambda x, groups: x.new_empty(groups, 2 * x.shape[1] + 1, dtype=torch.float64),
)

settle = Operator(
    "batch_norm_settle",
    reference.settle,
    kernel="batch_norm",
    takes=lambda parts_RGS, running_mean, running_var, tracked, momentum, dtype: (
        takes_triton(parts_RGS.device, dtype) and (running_mean is None or running_mean.dtype == torch.float32)
    ),
    writes=("running_mean", "running_var", "tracked"),
    fake=lambda parts_RGS, dtype, **_: (
        *(parts_RGS.new_empty(parts_RGS.shape[1], parts_RGS.shape[2] // 2, dtype=dtype) for _ in range(2)),
        parts_RGS.new_empty(parts_RGS.shape[1]),
    ),
)

normalise = Operator(
    "batch_norm_normalise",
    reference.normalise,
    kernel="batch_norm",
    fake=lambda x, keep_mask, **_: (torch.empty_like(x), reference.empty_mask(x, keep_mask)),
)

normalise_ = Operator("batch_norm_normalise_", reference.normalise_, kernel="batch_norm", writes=("x",))

pool = Operator(
    "batch_norm_pool",
    reference.pool,
    kernel="batch_norm",
    fake=lambda x, keep_choice, **_: (
        y := x.new_empty(*x.shape[:2], *reference.pooled_size(x)).contiguous(memory_format=torch.channels_last),
        torch.empty_like(y, dtype=torch.uint8) if keep_choice else x.new_empty(0, dtype=torch.uint8),
    ),
)

sums = Operator(
    "batch_norm_sums",
    reference.sums,
    kernel="batch_norm",
    fake=lambda x, mean_GC, keep, **_: (
        mean_GC.new_empty(mean_GC.shape[0], 2, mean_GC.shape[1], dtype=torch.float64),
        mean_GC.new_empty(2, mean_GC.shape[1]),
        torch.empty_like(x) if keep else x.new_empty(0),
    ),
)

gradient = Operator(
    "batch_norm_gradient", reference.gradient, kernel="batch_norm", fake=lambda x, **_: torch.empty_like(x)
)

norm_product = Operator(
    "norm_product",
    reference.norm_product,
    kernel="norm_product",
    fake=lambda x, matrix_CK, groups, **_: (
        x.new_empty(len(x), len(matrix_CK), *x.shape[2:]).contiguous(memory_format=torch.channels_last),
        x.new_empty(groups, 2 * len(matrix_CK) + 1, dtype=torch.float64),
    ),
)


def chosen_for(x: Tensor) -> tuple[Any, AbstractContextManager]:
    """The functions for a pass over x, under the operators' names, and the context to call them in.

    Chosen once for the whole pass: the operators if torch has to see them, otherwise the launchers or the twins.
    """
    if needs_dispatcher():
        return sys.modules[__name__], nullcontext()
    if not takes_triton(x.device, x.dtype):
        return reference, nullcontext()
    from . import batch_norm  # lazily: it imports Triton

    return batch_norm, on_device_of(x)
