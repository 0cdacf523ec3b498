"""Batch norm with statistics per group of images (a view is a group), over the images of all ranks.

One pass over all groups gives the same results as one pass per group: each group has its own statistics, and running
buffers are updated once per group, in order. All groups share one collective forward and one backward, of a few float64
numbers per channel. Ranks may have different numbers of rows, because the counts are exchanged too and stay on the
device. Every rank merges the same numbers in the same order, so statistics and running buffers are bitwise equal on all
ranks. The arithmetic is that of `kernels.batch_norm_reference`.

Shape suffixes: G groups, R ranks, C channels.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from unigrad_fast.kernels import batch_norm_ops
from unigrad_fast.kernels.batch_norm_reference import is_dense
from unigrad_fast.kernels.dispatch import host_may_read, use_triton
from unigrad_fast.runtime.torch_private import BatchNorm


def is_alone() -> bool:
    """Whether there is no other rank to share statistics with."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1


Statistics: TypeAlias = "tuple[Tensor, Tensor, Tensor]"  # mean, variance [G, C] and rows [G], over all ranks


class Groups:
    """Number of groups in a batch, shared by all norms of an encoder.

    Attributes:
        count: number of equally large groups, one after the other along the first dimension.
        current: the running pass, if it can be repeated.
    """

    def __init__(self) -> None:
        self.count = 1
        self.current: Pass | None = None

    def repeatable(self) -> tuple[Pass, Pass]:
        """Contexts for a pass and its recomputation, for `torch.utils.checkpoint`; norms return the same bits in both.

        In the recomputation norms reuse the statistics of the pass: they issue no collective and do not update the
        running buffers.
        """
        first = Pass(self, self.count)
        return first, Pass(self, self.count, first.statistics, repeats=True)


@dataclass
class Pass:
    """A pass through norms, or its recomputation; a context manager that can be entered again.

    Attributes:
        count: value of `Groups.count` inside.
        statistics: statistics of the pass, by norm.
    """

    groups: Groups
    count: int
    statistics: dict[nn.Module, Statistics] = field(default_factory=dict)
    repeats: bool = False

    def __enter__(self) -> None:
        self._around = self.groups.count, self.groups.current
        self.groups.count, self.groups.current = self.count, self

    def __exit__(self, *error: object) -> None:
        self.groups.count, self.groups.current = self._around


class GroupedBatchNorm(BatchNorm):
    """Batch norm over the images of all ranks, group by group, for tensors [G·N, C], [G·N, C, L] or [G·N, C, H, W].

    A drop-in for torch's BatchNorm1d and BatchNorm2d: same arguments, parameters, buffers and rules; output in the
    dtype and memory format of the input; statistics in fp32 or better. In evaluation mode it is torch's batch norm. In
    training all ranks must call it in the same order. Running buffers are updated in place.

    Attributes:
        groups: how the input is divided into groups.
        synchronised: whether ranks share statistics.

    Raises:
        ValueError: in training, fewer than 2 values per channel and group over all ranks together (not checked on a
            GPU, where the host would have to wait).
    """

    groups: Groups
    synchronised: bool

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        relu: bool = False,
        twice: bool = False,
        pool: nn.MaxPool2d | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """relu(norm(x) + residual), both optional.

        Args:
            x: the input; without gradient it may be overwritten if `relu` or `residual` is given.
            residual: a tensor shaped like x.
            twice: the result will be used twice, so the kernels, in training, may return two tensors that share its
                memory: backward then adds the gradients of both where it reads them.
            pool: applied after the ReLU; without `residual` and `twice`. In training the kernels have that of a ResNet.
        """
        if not 2 <= x.dim() <= 4:
            raise ValueError(f"batch norm takes inputs with 2 to 4 dimensions, got {x.dim()}")
        fused = use_triton(x.device) and x.dtype != torch.float64 and x.dim() != 3
        if pool is not None and not (fused and self.training and relu and _is_stem(pool)):
            return pool(self.forward(x, residual, relu))
        if self.training and (fused or self._shares_statistics()):
            return self._train(x, residual, relu, twice, pool is not None, fused)
        if fused and not torch.is_grad_enabled() and self.running_mean is not None:
            return self._normalise(x, self.running_mean[None], self.running_var[None], residual, relu)
        if not self.training:
            return _finished(super().forward(x), residual, relu)
        parts = [self._alone(part) for part in x.chunk(self.groups.count)]
        return _finished(torch.cat(parts) if len(parts) > 1 else parts[0], residual, relu)

    def _alone(self, x: Tensor) -> Tensor:
        """torch's own batch norm, for one rank and one group, in training."""
        if self.groups.current is None or not self.groups.current.repeats:
            return super().forward(x)
        running = [None if buffer is None else buffer.clone() for buffer in (self.running_mean, self.running_var)]
        return F.batch_norm(x, *running, self.weight, self.bias, training=True, eps=self.eps)  # statistics of x again

    def _check_input_dim(self, input: Tensor) -> None:
        """Already checked in `forward`."""

    def _train(self, x: Tensor, residual: Tensor | None, relu: bool, twice: bool, pool: bool, fused: bool):
        if not torch.is_grad_enabled() and fused:
            mean_GC, variance_GC, _ = self._statistics(x)
            if pool:
                return batch_norm_ops.pool(x, mean_GC, variance_GC, self.weight, self.bias, self.eps, False)[0]
            return self._normalise(x, mean_GC, variance_GC, residual, relu)
        x = _dense(x, like=x)
        with torch.no_grad():
            statistics = self._statistics(x)
        settings = (*statistics, self.eps, self._shares_statistics())
        affine = (self.weight, self.bias)
        if fused:
            return _GroupedBatchNorm.apply(x, *affine, residual, relu, twice, pool, *settings)
        return _finished(_GroupedBatchNorm.apply(x, *affine, None, False, False, False, *settings), residual, relu)

    def _shares_statistics(self) -> bool:
        return self.synchronised and not is_alone()

    def _statistics(self, x: Tensor) -> Statistics:
        """Statistics of x, also used to update the running buffers; in a recomputation, those of the pass."""
        current = self.groups.current
        if current is not None and current.repeats:
            return current.statistics[self]
        own_G3C = batch_norm_ops.statistics(x, self.groups.count)
        parts_RG3C = own_G3C.unsqueeze(0)
        if self._shares_statistics():
            parts_RG3C = own_G3C.new_empty(dist.get_world_size(), *own_G3C.shape)
            dist.all_gather(list(parts_RG3C.unbind()), own_G3C)
        if host_may_read(x):
            least = int(parts_RG3C[:, :, 0, 0].sum(0).min())
            if least <= 1:
                raise ValueError(
                    "batch norm in training needs more than 1 value per channel over all ranks together, "
                    f"got {least} (input of this rank: {list(x.shape)}, {self.groups.count} groups); use a larger batch"
                )
        state = (self.running_mean, self.running_var, self.num_batches_tracked, self.momentum)
        found = batch_norm_ops.settle(parts_RG3C, *state, torch.promote_types(x.dtype, torch.float32))
        if current is not None:
            current.statistics[self] = found
        return found

    def _normalise(self, x: Tensor, mean_GC, variance_GC, residual: Tensor | None, relu: bool) -> Tensor:
        """Normalise without gradient; overwrites x if it is not needed afterwards."""
        arguments = (mean_GC, variance_GC, self.weight, self.bias, residual, self.eps, relu)
        if is_dense(x) and (relu or residual is not None):
            batch_norm_ops.normalise_(x, *arguments)
            return x
        return batch_norm_ops.normalise(x, *arguments, False)[0]


def _is_stem(pool: nn.MaxPool2d) -> bool:
    """Whether a kernel has this pooling: a ResNet's."""
    settings = (pool.kernel_size, pool.stride, pool.padding, pool.dilation, pool.ceil_mode, pool.return_indices)
    return type(pool) is nn.MaxPool2d and settings == (3, 2, 1, 1, False, False)


def _finished(y: Tensor, residual: Tensor | None, relu: bool) -> Tensor:
    if residual is not None:
        y += residual
    return torch.relu_(y) if relu else y


class _GroupedBatchNorm(torch.autograd.Function):
    """Normalisation with each group's statistics over all ranks."""

    @staticmethod
    def forward(ctx, x, weight, bias, residual, relu, twice, pool, mean_GC, variance_GC, count_G, eps, synchronised):
        residual = None if residual is None else _dense(residual, like=x)
        # Without a residual, backward can derive the ReLU's mask from x.
        keep_mask = pool or (relu and residual is not None)
        affine = (mean_GC, variance_GC, weight, bias)
        if pool:
            y, mask = batch_norm_ops.pool(x, *affine, eps, True)
        else:
            y, mask = batch_norm_ops.normalise(x, *affine, residual, eps, relu, keep_mask)
        ctx.save_for_backward(x, weight, bias, mean_GC, variance_GC, count_G, mask if keep_mask else None)
        ctx.eps, ctx.relu, ctx.residual, ctx.synchronised = eps, relu and not pool, residual is not None, synchronised
        ctx.pool = pool
        if not twice:
            return y
        ctx.set_materialize_grads(False)
        return y, y.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, second=None):
        x, weight, bias, mean_GC, variance_GC, count_G, mask = ctx.saved_tensors
        if dy is None:  # only the second of two results was used
            dy, second = second, None
        dy, second = (None if each is None else _dense(each, like=x) for each in (dy, second))
        mask, choice = (None, mask) if ctx.pool else (mask, None)
        keep = second is not None or (ctx.residual and ctx.relu)
        arguments = (x, mean_GC, variance_GC, weight, bias)
        settings = (ctx.eps, ctx.relu, second, keep, choice)
        sums_G2C, dparameters_2C, kept = batch_norm_ops.sums(dy, *arguments, mask, *settings)
        dy = kept if keep else dy
        dx = None
        if ctx.needs_input_grad[0]:
            if ctx.synchronised:
                dist.all_reduce(sums_G2C)
            dx = batch_norm_ops.gradient(dy, *arguments, sums_G2C, count_G, ctx.eps, ctx.relu and not keep, choice)
        dweight, dbias = (
            None if p is None else d.to(p.dtype) for p, d in zip((weight, bias), dparameters_2C, strict=True)
        )
        return dx, dweight, dbias, dy if ctx.residual else None, *([None] * 8)


def _dense(x: Tensor, like: Tensor) -> Tensor:
    """x as contiguous or channels-last, whichever `like` is; always channels-last for the kernels."""
    channels_last = like.dim() == 4 and (
        use_triton(like.device) or like.is_contiguous(memory_format=torch.channels_last)
    )
    return x.contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)


def convert(module: nn.Module, synchronised: bool = True) -> Groups:
    """Turn every batch norm in `module` into a GroupedBatchNorm.

    The module objects, their hooks, parameters and buffers are kept; only their forward changes.

    Args:
        synchronised: whether ranks share statistics.

    Returns:
        The groups, through which the caller tells all norms how their input is divided.
    """
    groups = Groups()
    for part in module.modules():
        if isinstance(part, nn.BatchNorm1d | nn.BatchNorm2d):
            part.__class__ = GroupedBatchNorm
            part.groups, part.synchronised = groups, synchronised
    return groups
