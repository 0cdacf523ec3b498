"""1×1 convolutions of a pass without gradient, as products with the norms around them, on a GPU.

In training a norm reads its input twice: for its statistics, and to normalise. `kernels/norm_product.py` computes the
statistics with the convolution before the norm, and normalises in the convolution after it, whose input is then never
in memory. With gradient the backward pass needs that input, and kernels of cuDNN.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from unigrad_fast.kernels import batch_norm_ops
from unigrad_fast.kernels.batch_norm_reference import is_dense
from unigrad_fast.kernels.dispatch import use_triton
from unigrad_fast.kernels.heuristics import HALF
from unigrad_fast.networks.batch_norm import Deferred, GroupedBatchNorm

TRIED = False  # on a GPU; until then encoders have none: the bytes that they save are counted, their speed is not known


class NormConv2d(nn.Conv2d):
    """A 1×1 convolution that, without gradient, also computes the statistics of the norm after it."""

    def forward(self, x: Tensor | Deferred, norm: GroupedBatchNorm | None = None) -> Tensor:
        """The convolution of x [N, K, H, W], which may be deferred where `fuses` says so.

        Args:
            norm: the norm that takes the result next; it finds the statistics in its groups.
        """
        deferred = x if isinstance(x, Deferred) else Deferred(x)
        if norm is None or not fuses(self, norm, deferred.x):
            return super().forward(x)
        images, *before = deferred
        y, norm.groups.own[norm] = batch_norm_ops.norm_product(
            images, self.weight.flatten(1), norm.groups.count, *before
        )
        return y


def fuses(convolution: nn.Module, norm: GroupedBatchNorm, x: Tensor) -> bool:
    """Whether a convolution of x, or of a norm of x, is a product; in fp32 cuDNN convolves, in its own precision."""
    if not isinstance(convolution, NormConv2d) or torch.is_grad_enabled() or not norm.training:
        return False
    return x.dtype in HALF and x.dtype == convolution.weight.dtype and use_triton(x.device) and is_dense(x)


def convolved(convolution: nn.Module, norm: GroupedBatchNorm, x: Tensor | Deferred) -> Tensor:
    """convolution(x), which `norm` takes next."""
    return convolution(x, norm) if isinstance(convolution, NormConv2d) else convolution(x)


def use_norm_convolutions(module: nn.Module) -> None:
    """Make every plain 1×1 convolution of a module a NormConv2d; parameters and their names stay the same."""
    for part in module.modules():
        plain = type(part) is nn.Conv2d and part.kernel_size == part.stride == (1, 1) and part.padding == (0, 0)
        if plain and part.groups == 1 and part.bias is None:
            part.__class__ = NormConv2d
