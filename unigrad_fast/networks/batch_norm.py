"""Batch norm with statistics per group of images (a view is a group), over the images of all ranks.

One pass over all groups gives the same results as one pass per group: each group has its own statistics, and running
buffers are updated once per group, in order. All groups share one collective forward and one backward, of two float64
numbers per channel. Ranks may have different numbers of rows, because the counts are exchanged too and stay on the
device. Every rank merges the same numbers in the same order, so statistics and running buffers are bitwise equal on all
ranks. The arithmetic is that of `kernels.batch_norm_reference`.

Shape suffixes: G groups, R ranks, C channels, S = 2C + 1 statistics.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from unigrad_fast.kernels import batch_norm_ops
from unigrad_fast.kernels.batch_norm_reference import is_dense
from unigrad_fast.kernels.dispatch import host_may_read, use_triton
from unigrad_fast.runtime.collectives import gather_into
from unigrad_fast.runtime.torch_private import BatchNorm


def is_alone() -> bool:
    """Whether there is no other rank to share statistics with."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1


def gathered(own_GS: Tensor) -> Tensor:
    """What each rank has, [R, G, S]."""
    groups, numbers = own_GS.shape
    parts = own_GS.new_empty(dist.get_world_size() * groups, numbers)  # gloo takes no other shape
    gather_into(parts, own_GS)
    return parts.view(-1, groups, numbers)


def summed_(sums_G2C: Tensor) -> None:
    """Adds up what each rank has, in place."""
    dist.all_reduce(sums_G2C)


Statistics: TypeAlias = "tuple[Tensor, Tensor, Tensor]"  # mean, variance [G, C] and rows [G], over all ranks


class Groups:
    """Number of groups in a batch, shared by all norms of an encoder.

    Attributes:
        count: number of equally large groups, one after the other along the first dimension.
        current: the running pass, if it can be repeated.
        own: statistics of this rank's part of a norm's next input, [G, S], where they were computed with the input.
        gathered: statistics of all ranks' parts of a norm's next input, [R, G, S], where they were gathered before.
    """

    def __init__(self) -> None:
        self.count = 1
        self.current: Pass | None = None
        self.own: dict[nn.Module, Tensor] = {}
        self.gathered: dict[nn.Module, Tensor] = {}

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


class Deferred(NamedTuple):
    """relu(norm(x)), left to what reads x; without statistics x itself."""

    x: Tensor
    mean_GC: Tensor | None = None
    variance_GC: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    eps: float = 0.0


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
        defer: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor] | Deferred:
        """relu(norm(x) + residual), both optional.

        Args:
            x: the input; without gradient it may be overwritten if `relu` or `residual` is given.
            residual: a tensor shaped like x.
            twice: the result will be used twice, so the kernels, in training, may return two tensors that share its
                memory: backward then adds the gradients of both where it reads them.
            pool: applied after the ReLU; without `residual` and `twice`. In training the kernels have that of a ResNet.
            defer: only find the statistics; with `relu` alone, in training without gradient, for the kernels.
        """
        if not 2 <= x.dim() <= 4:
            raise ValueError(f"batch norm takes inputs with 2 to 4 dimensions, got {x.dim()}")
        fused = use_triton(x.device) and x.dtype != torch.float64 and x.dim() != 3
        if pool is not None and not (fused and self.training and relu and _is_stem(pool)):
            return pool(self.forward(x, residual, relu))
        shared = self.training and self.synchronised and not is_alone()
        if self.training and (fused or shared):
            return self._train(x, residual, (relu, twice, pool is not None, shared), fused, defer)
        if fused and not torch.is_grad_enabled() and self.running_mean is not None:
            return self._normalise(batch_norm_ops, x, self.running_mean[None], self.running_var[None], residual, relu)
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

    def _train(
        self, x: Tensor, residual: Tensor | None, settings: tuple[bool, bool, bool, bool], fused: bool, defer: bool
    ):
        relu, _, pool, shared = settings
        if not torch.is_grad_enabled() and fused:
            functions, device = batch_norm_ops.chosen_for(x)
            with device:
                mean_GC, variance_GC, _ = self._statistics(functions, x, shared)
                if defer:
                    return Deferred(x, mean_GC, variance_GC, self.weight, self.bias, self.eps)
                if pool:
                    return functions.pool(x, mean_GC, variance_GC, self.weight, self.bias, self.eps, False)[0]
                return self._normalise(functions, x, mean_GC, variance_GC, residual, relu)
        if fused:
            return _GroupedBatchNorm.apply(x, self.weight, self.bias, residual, settings, self)
        y = _GroupedBatchNorm.apply(x, self.weight, self.bias, None, (False, False, False, shared), self)
        return _finished(y, residual, relu)

    def own_statistics(self, x: Tensor) -> Tensor:
        """Statistics of this rank's part of an input, [G, S] in float64."""
        own_GS = self.groups.own.pop(self, None)
        if own_GS is not None:
            return own_GS
        functions, device = batch_norm_ops.chosen_for(x)
        with device:
            return functions.statistics(_dense(x, like=x), self.groups.count)

    def _statistics(self, functions: Any, x: Tensor, shared: bool) -> Statistics:
        """Statistics of x, also used to update the running buffers; in a recomputation, those of the pass."""
        current = self.groups.current
        if current is not None and current.repeats:
            return current.statistics[self]
        parts_RGS = self.groups.gathered.pop(self, None)
        if parts_RGS is None:
            own_GS = self.groups.own.pop(self, None)
            own_GS = functions.statistics(x, self.groups.count) if own_GS is None else own_GS
            parts_RGS = gathered(own_GS) if shared else own_GS.unsqueeze(0)
        if host_may_read(x):
            least = int(parts_RGS[..., -1].sum(0).min())
            if least <= 1:
                raise ValueError(
                    "batch norm in training needs more than 1 value per channel over all ranks together, "
                    f"got {least} (input of this rank: {list(x.shape)}, {self.groups.count} groups); use a larger batch"
                )
        state = (self.running_mean, self.running_var, self.num_batches_tracked, self.momentum)
        found = functions.settle(parts_RGS, *state, torch.promote_types(x.dtype, torch.float32))
        if current is not None:
            current.statistics[self] = found
        return found

    def _normalise(
        self, functions: Any, x: Tensor, mean_GC, variance_GC, residual: Tensor | None, relu: bool
    ) -> Tensor:
        """Normalise without gradient; overwrites x if it is not needed afterwards."""
        arguments = (mean_GC, variance_GC, self.weight, self.bias, residual, self.eps, relu)
        if is_dense(x) and (relu or residual is not None):
            functions.normalise_(x, *arguments)
            return x
        return functions.normalise(x, *arguments, False)[0]


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
    def forward(ctx, x, weight, bias, residual, settings, norm):
        relu, twice, ctx.pool, ctx.shared = settings
        x = _dense(x, like=x)
        residual = None if residual is None else _dense(residual, like=x)
        # Without a residual, backward can derive the ReLU's mask from x.
        keep_mask = ctx.pool or (relu and residual is not None)
        functions, device = batch_norm_ops.chosen_for(x)
        with device:
            statistics = norm._statistics(functions, x, ctx.shared)
            affine = (*statistics[:2], weight, bias)
            if ctx.pool:
                y, mask = functions.pool(x, *affine, norm.eps, True)
            else:
                y, mask = functions.normalise(x, *affine, residual, norm.eps, relu, keep_mask)
        ctx.save_for_backward(x, *affine, mask if keep_mask else None, statistics[2])
        ctx.eps, ctx.relu, ctx.residual = norm.eps, relu and not ctx.pool, residual is not None
        if not twice:
            return y
        ctx.set_materialize_grads(False)
        return y, y.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, second=None):
        *saved, mask, count_G = ctx.saved_tensors
        x, weight, bias = saved[0], saved[3], saved[4]
        if dy is None:  # only the second of two results was used
            dy, second = second, None
        dy = _dense(dy, like=x)
        second = None if second is None else _dense(second, like=x)
        mask, choice = (None, mask) if ctx.pool else (mask, None)
        keep = second is not None or (ctx.residual and ctx.relu)
        functions, device = batch_norm_ops.chosen_for(x)
        dx = None
        with device:
            settings = (ctx.eps, ctx.relu, second, keep, choice)
            sums_G2C, dparameters_2C, kept = functions.sums(dy, *saved, mask, *settings)
            dy = kept if keep else dy
            if ctx.needs_input_grad[0]:
                if ctx.shared:
                    summed_(sums_G2C)
                dx = functions.gradient(dy, *saved, sums_G2C, count_G, ctx.eps, ctx.relu and not keep, choice)
        dweight, dbias = dparameters_2C.unbind()
        dweight = None if weight is None else dweight.to(weight.dtype)
        dbias = None if bias is None else dbias.to(bias.dtype)
        return dx, dweight, dbias, dy if ctx.residual else None, None, None


def _dense(x: Tensor, like: Tensor) -> Tensor:
    """x as contiguous or channels-last, whichever `like` is; always channels-last for the kernels."""
    channels_last = like.dim() == 4 and (
        like.is_contiguous(memory_format=torch.channels_last) or use_triton(like.device)
    )
    return x.contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)


def convert(module: nn.Module, synchronised: bool = True) -> Groups:
    """Turn every batch norm in `module` into a GroupedBatchNorm, with new groups if it is one.

    The module objects, their hooks, parameters and buffers are kept; only their forward changes.

    Args:
        synchronised: whether ranks share statistics.

    Returns:
        The groups, through which the caller tells all norms how their input is divided.
    """
    groups = Groups()
    for part in module.modules():
        if isinstance(part, nn.BatchNorm1d | nn.BatchNorm2d | GroupedBatchNorm):
            part.__class__ = GroupedBatchNorm
            part.groups, part.synchronised = groups, synchronised
    return groups
