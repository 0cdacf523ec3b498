"""The torch operators of batch norm by groups: their schemas, who computes them, and what shapes they return.

As in `ops`: the Triton kernels of `batch_norm` on CUDA, the functions of `batch_norm_reference`, which say what the
arguments are, elsewhere and in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import batch_norm_reference as reference
from .dispatch import exact_dtype, on_device_of, takes_triton
from .ops import _LIBRARY as LIBRARY

WORD = reference.WORD

LIBRARY.define("batch_norm_statistics(Tensor x, int groups) -> Tensor")


def _takes(x: Tensor) -> bool:
    return takes_triton(x.device, x.dtype, exact_dtype(x))


@torch.library.impl(LIBRARY, "batch_norm_statistics", "CompositeExplicitAutograd")
def _statistics(x, groups):
    if _takes(x):
        from . import batch_norm as kernel

        with on_device_of(x):
            return kernel.statistics(x, groups)
    return reference.statistics(x, groups)


@torch.library.register_fake("unigrad_fast::batch_norm_statistics", lib=LIBRARY)
def _(x, groups):
    return x.new_empty(groups, 3, x.shape[1], dtype=torch.float64)


LIBRARY.define(
    "batch_norm_settle(Tensor parts, Tensor(a!)? running_mean, Tensor(b!)? running_var, Tensor(c!)? tracked, "
    "float? momentum, ScalarType dtype) -> (Tensor, Tensor, Tensor)"
)


@torch.library.impl(LIBRARY, "batch_norm_settle", "CompositeExplicitAutograd")
def _settle(parts, running_mean, running_var, tracked, momentum, dtype):
    if takes_triton(parts.device, dtype) and (running_mean is None or running_mean.dtype == torch.float32):
        from . import batch_norm as kernel

        with on_device_of(parts):
            return kernel.settle(parts, running_mean, running_var, tracked, momentum=momentum)
    return reference.settle(parts, running_mean, running_var, tracked, momentum=momentum, dtype=dtype)


@torch.library.register_fake("unigrad_fast::batch_norm_settle", lib=LIBRARY)
def _(parts, running_mean, running_var, tracked, momentum, dtype):
    _, groups, _, channels = parts.shape
    mean, variance = (parts.new_empty(groups, channels, dtype=dtype) for _ in range(2))
    return mean, variance, parts.new_empty(groups)


_AFFINE = "Tensor mean, Tensor variance, Tensor? weight, Tensor? bias"
LIBRARY.define(
    f"batch_norm_normalise(Tensor x, {_AFFINE}, Tensor? residual, float eps, bool relu, bool keep_mask)"
    " -> (Tensor, Tensor)"
)


@torch.library.impl(LIBRARY, "batch_norm_normalise", "CompositeExplicitAutograd")
def _normalise(x, mean, variance, weight, bias, residual, eps, relu, keep_mask):
    settings = {"eps": eps, "relu": relu, "keep_mask": keep_mask}
    if _takes(x):
        from . import batch_norm as kernel

        with on_device_of(x):
            y, mask = kernel.normalise(x, mean, variance, weight, bias, residual, **settings)
    else:
        y, mask = reference.normalise(x, mean, variance, weight, bias, residual, **settings)
    return y, x.new_empty(0, dtype=torch.int32) if mask is None else mask


@torch.library.register_fake("unigrad_fast::batch_norm_normalise", lib=LIBRARY)
def _(x, mean, variance, weight, bias, residual, eps, relu, keep_mask):
    rows, channels = x.numel() // x.shape[1], x.shape[1]
    mask = (
        x.new_empty(rows, -(-channels // WORD), dtype=torch.int32) if keep_mask else x.new_empty(0, dtype=torch.int32)
    )
    return torch.empty_like(x), mask


LIBRARY.define(f"batch_norm_normalise_(Tensor(a!) x, {_AFFINE}, Tensor? residual, float eps, bool relu) -> ()")


@torch.library.impl(LIBRARY, "batch_norm_normalise_", "CompositeExplicitAutograd")
def _normalise_(x, mean, variance, weight, bias, residual, eps, relu):
    settings = {"eps": eps, "relu": relu, "keep_mask": False}
    if _takes(x) and is_dense(x):
        from . import batch_norm as kernel

        with on_device_of(x):
            kernel.normalise(x, mean, variance, weight, bias, residual, **settings, in_place=True)
        torch.autograd.graph.increment_version([x])
    else:
        x.copy_(_normalise(x, mean, variance, weight, bias, residual, **settings)[0])


@torch.library.register_fake("unigrad_fast::batch_norm_normalise_", lib=LIBRARY)
def _(x, mean, variance, weight, bias, residual, eps, relu):
    return None


LIBRARY.define(
    f"batch_norm_sums(Tensor dy, Tensor x, {_AFFINE}, Tensor? mask, float eps, bool relu) -> (Tensor, Tensor)"
)


@torch.library.impl(LIBRARY, "batch_norm_sums", "CompositeExplicitAutograd")
def _sums(dy, x, mean, variance, weight, bias, mask, eps, relu):
    if _takes(x):
        from . import batch_norm as kernel

        with on_device_of(x):
            return kernel.sums(dy, x, mean, variance, weight, bias, mask, eps=eps, relu=relu)
    return reference.sums(dy, x, mean, variance, weight, bias, mask, eps=eps, relu=relu)


@torch.library.register_fake("unigrad_fast::batch_norm_sums", lib=LIBRARY)
def _(dy, x, mean, variance, weight, bias, mask, eps, relu):
    groups, channels = mean.shape
    return mean.new_empty(groups, 2, channels, dtype=torch.float64), mean.new_empty(2, channels)


LIBRARY.define(
    f"batch_norm_gradient(Tensor dy, Tensor x, {_AFFINE}, Tensor? mask, Tensor sums, Tensor count, float eps, "
    "bool relu, bool residual) -> (Tensor, Tensor)"
)


@torch.library.impl(LIBRARY, "batch_norm_gradient", "CompositeExplicitAutograd")
def _gradient(dy, x, mean, variance, weight, bias, mask, sums, count, eps, relu, residual):
    settings = {"eps": eps, "relu": relu, "residual": residual}
    if _takes(x):
        from . import batch_norm as kernel

        with on_device_of(x):
            dx, dresidual = kernel.gradient(dy, x, mean, variance, weight, bias, mask, sums, count, **settings)
    else:
        dx, dresidual = reference.gradient(dy, x, mean, variance, weight, bias, mask, sums, count, **settings)
    if dresidual is None:
        dresidual = x.new_empty(0)
    elif dresidual is dy:  # which an operator may not return
        dresidual = dy.clone()
    return dx, dresidual


@torch.library.register_fake("unigrad_fast::batch_norm_gradient", lib=LIBRARY)
def _(dy, x, mean, variance, weight, bias, mask, sums, count, eps, relu, residual):
    return torch.empty_like(x), torch.empty_like(x) if residual else x.new_empty(0)


def is_dense(x: Tensor) -> bool:
    """Whether x lies as its rows of channels, one after the other."""
    return x.is_contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x.is_contiguous()
