"""Batch norm with the statistics of all ranks' images together, on the CPU; torch has its own for CUDA.

With x_r the n_r rows of rank r (images, or image positions), per channel:

    forward    μ, M₂ of all rows from the ranks' (n_r, μ_r, M₂_r), merged as Chan, Golub and LeVeque (1979) do
               y = x̂·γ + β,  x̂ = (x − μ) / σ,  σ² = M₂ / n + ε
    backward   dx = γ/σ · (dy − Σdy / n − x̂ · Σ(dy·x̂) / n)          sums over all ranks' rows
               dγ = Σ dy·x̂,  dβ = Σ dy                              sums over this rank's rows, as always

One collective forward and one backward, of a few float64 numbers per channel. Ranks may differ in rows. Every
rank merges the same numbers in the same order: statistics and running buffers are bitwise equal on all ranks.

Shape suffixes: R ranks, C channels.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

# Elements per block of the statistics: a block stays in the cache while it is read three times, and fp32 sums
# over its rows lose little. torch.batch_norm sums all rows of channels-last input at once: 65,536 of mean 1e4
# and deviation 1 give it a variance 9 times too large in fp32.
BLOCK_ELEMENTS = 1 << 17

_fixed_backward = torch.ops.aten.native_batch_norm_backward


def local_statistics(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, mean and sum of squared deviations of this rank, per channel.

    Args:
        x: [N, C, ...], contiguous or channels-last; N may be 0.

    Returns:
        count [], mean [C], squares [C], all float64.
    """
    channels = x.shape[1]
    if x.numel() == 0:
        zeros = x.new_zeros(channels, dtype=torch.float64)
        return zeros[0], zeros, zeros.clone()
    unit_C = torch.ones(channels, dtype=torch.promote_types(x.dtype, torch.float32))
    blocks = x.split(max(1, BLOCK_ELEMENTS // x[0].numel()))
    ones = torch.ones_like(blocks[0])
    parts = []
    for block in blocks:
        # The running buffers, unused, are there to make the results fp32 for bf16 input.
        mean_C, variance_C = torch.batch_norm_update_stats(block, unit_C.clone(), unit_C.clone(), 0.0)
        # Σ (x − mean), what rounding left out of the mean: the weight's gradient for an output gradient of 1.
        _, rest_C, _ = _fixed_backward(
            ones[: len(block)], block, unit_C, mean_C, unit_C, None, None, False, 0.0, [False, True, False]
        )
        rows = block.numel() // channels
        rest_C = rest_C.double() / rows
        squares_C = rows * (variance_C.double() - rest_C.square()).clamp_min(0)
        parts.append(torch.stack([torch.full_like(rest_C, rows), mean_C.double() + rest_C, squares_C]))
    return merge(torch.stack(parts))


def merge(parts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Statistics of the union of disjoint sets of rows (Chan, Golub and LeVeque, 1979).

    Args:
        parts: [R, 3, C] float64: rows, mean and sum of squared deviations of each set.

    Returns:
        count [], mean [C], squares [C].
    """
    count_RC, mean_RC, squares_RC = parts.unbind(1)
    count_C = count_RC.sum(0)
    mean_C = (count_RC * mean_RC).sum(0) / count_C
    squares_C = squares_RC.sum(0) + (count_RC * (mean_RC - mean_C).square()).sum(0)
    return count_C[0], mean_C, squares_C


def all_rank_statistics(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The statistics of `local_statistics` over the rows of all ranks, bitwise equal on all of them."""
    count, mean_C, squares_C = local_statistics(x)
    own = torch.stack([count.expand_as(mean_C), mean_C, squares_C])
    gathered = own.new_empty(dist.get_world_size(), *own.shape)
    dist.all_gather(list(gathered.unbind()), own)
    return merge(gathered)


def _dense(x: Tensor, like: Tensor) -> Tensor:
    """x in contiguous or channels-last memory, whichever `like` has."""
    channels_last = like.dim() == 4 and like.is_contiguous(memory_format=torch.channels_last)
    return x.contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)


class _SynchronisedBatchNorm(torch.autograd.Function):
    """The normalisation with all ranks' statistics; updates the running buffers in place."""

    @staticmethod
    def forward(ctx, x, weight, bias, running_mean, running_var, momentum, eps):
        x = _dense(x, like=x)
        count, mean, squares = all_rank_statistics(x)
        if count <= 1:
            raise ValueError(
                "batch norm in training needs more than 1 value per channel over all ranks together, "
                f"got {int(count)} (input of this rank: {list(x.shape)}); use a larger batch"
            )
        if running_mean is not None:
            variance = squares / (count - 1)
            running_mean.mul_(1 - momentum).add_(mean.to(running_mean.dtype), alpha=momentum)
            running_var.mul_(1 - momentum).add_(variance.to(running_var.dtype), alpha=momentum)
        dtype = torch.promote_types(x.dtype, torch.float32)
        mean, variance = mean.to(dtype), (squares / count).to(dtype)
        weight = torch.ones_like(mean) if weight is None else weight.to(dtype)
        bias = torch.zeros_like(mean) if bias is None else bias.to(dtype)
        ctx.save_for_backward(x, weight, mean, variance, count)
        ctx.eps = eps
        return F.batch_norm(x, mean, variance, weight, bias, eps=eps)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight, mean, variance, count = ctx.saved_tensors
        dy = _dense(dy, like=x)
        zero, unit = torch.zeros_like(mean), torch.ones_like(mean)
        if x.numel():
            # With fixed statistics the gradients of weight and bias are exactly this rank's Σ dy·x̂ and Σ dy.
            _, dy_normalised_sum, dy_sum = _fixed_backward(
                dy, x, unit, mean, variance, None, None, False, ctx.eps, [False, True, True]
            )
        else:
            dy_normalised_sum, dy_sum = zero, zero
        dx = None
        if ctx.needs_input_grad[0]:
            sums = torch.stack([dy_normalised_sum, dy_sum]).double()
            dist.all_reduce(sums)
            dy_normalised_mean, dy_mean = (sums / count).to(mean.dtype)
            scale = weight * torch.rsqrt(variance + ctx.eps)
            # Both terms have the form of a batch norm with fixed statistics, which is one fused pass each.
            dx = F.batch_norm(dy, zero, unit, scale, -scale * dy_mean, eps=0.0)
            dx += F.batch_norm(x, mean, variance, -scale * dy_normalised_mean, zero, eps=ctx.eps)
        return dx, dy_normalised_sum, dy_sum, None, None, None, None


def is_alone() -> bool:
    """Whether there is no other rank to share statistics with, so that torch's faster batch norm will do."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1


class CPUSyncBatchNorm(_BatchNorm):
    """Batch norm over the images of all ranks, for CPU tensors [N, C], [N, C, L] or [N, C, H, W].

    A drop-in for torch's BatchNorm1d and BatchNorm2d: same arguments, parameters, buffers and rules, output
    in the dtype and memory format of the input; statistics in fp32 or better. Without a process group, with a
    single rank and in evaluation it is torch's batch norm. In training all ranks must call it in the same
    order. Running buffers are updated in place.

    Raises:
        ValueError: in training, fewer than 2 values per channel over all ranks together.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        if not 2 <= input.dim() <= 4:
            raise ValueError(f"batch norm takes an input of 2 to 4 dimensions, got {input.dim()}")

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or is_alone():
            return super().forward(x)
        self._check_input_dim(x)
        momentum = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if momentum is None:
                momentum = 1.0 / float(self.num_batches_tracked)
        return _SynchronisedBatchNorm.apply(
            x, self.weight, self.bias, self.running_mean, self.running_var, momentum, self.eps
        )


def convert(module: nn.Module, device_type: str) -> nn.Module:
    """Make every batch norm in `module` synchronise over ranks.

    Args:
        device_type: "cuda" takes `torch.nn.SyncBatchNorm`, "cpu" takes `CPUSyncBatchNorm`.

    Returns:
        The module (a new one on CUDA if `module` is a batch norm itself); parameters and buffers are the same
        tensors under the same names.
    """
    if device_type == "cuda":
        return nn.SyncBatchNorm.convert_sync_batchnorm(module)
    for part in module.modules():
        if isinstance(part, nn.BatchNorm1d | nn.BatchNorm2d):
            # The module stays what it is, hooks and all; only its forward changes.
            part.__class__ = CPUSyncBatchNorm
    return module
