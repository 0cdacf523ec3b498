"""Averages gradients over the ranks in buckets, while backward still computes those of earlier layers.

Used at ZeRO stage 0, where DeepSpeed would flatten all gradients after backward, reduce them in one call and copy them
back. Here each gradient is copied once, into its bucket, and becomes a view of it. Buckets are filled from the last
layer to the first, following backward, and reduced in that order on every rank, whichever becomes ready first; this
order alone pairs up the ranks' collectives. With two ranks, sums do not depend on the buckets; with three or more, the
bucket size can change the order of summation and thus the rounding.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from unigrad_fast.runtime.torch_private import foreach_copy_

BUCKET_BYTES = 25_000_000  # as in DDP: large enough for bandwidth, small enough to start early
ALIGNMENT = 64  # elements, so that gradients are aligned for 128-bit accesses


@dataclass
class _Bucket:
    """Parameters whose gradients are adjacent in memory, in the order of backward.

    Attributes:
        places: first element of each parameter's gradient.
        missing: parameters whose gradient backward has not computed yet.
    """

    places: dict[Tensor, int] = field(default_factory=dict)
    numel: int = 0
    missing: set[Tensor] = field(default_factory=set)
    flat: Tensor | None = None
    work: dist.Work | None = None

    def take(self, parameter: Tensor) -> None:
        self.places[parameter] = self.numel
        self.numel += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT

    def view(self, parameter: Tensor) -> Tensor:
        """The parameter's gradient in the bucket, with the parameter's memory layout."""
        place = self.places[parameter]
        if is_dense(parameter):
            return self.flat.as_strided(parameter.shape, parameter.stride(), place)
        return self.flat[place : place + parameter.numel()].view(parameter.shape)


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor's elements fill its memory, in some order of dimensions."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


class BucketedReduction:
    """Averages gradients over all ranks of the default group during backward.

    Args:
        parameters: trained parameters in the order of the forward pass, the same on all ranks. A parameter has a
            gradient on all ranks or on none; without one it stays without.
        bucket_bytes: size from which a bucket is full.
        divide_first: divide gradients by the number of ranks before they are summed, not after, so that those of a
            scaled loss stay within the range of one rank's.
    """

    def __init__(self, parameters: Iterable[Tensor], bucket_bytes: int = BUCKET_BYTES, divide_first: bool = False):
        self._share, self._divide_first = 1.0 / dist.get_world_size(), divide_first
        self.buckets = [_Bucket()]
        self._bucket_of: dict[Tensor, _Bucket] = {}
        for parameter in reversed([p for p in parameters if p.requires_grad]):
            bucket = self.buckets[-1]
            if bucket.places and (
                bucket.numel * parameter.element_size() >= bucket_bytes
                or next(iter(bucket.places)).dtype != parameter.dtype
            ):
                bucket = _Bucket()
                self.buckets.append(bucket)
            bucket.take(parameter)
            self._bucket_of[parameter] = bucket
            parameter.register_post_accumulate_grad_hook(self._ready)
        self._active = False

    def open(self) -> None:
        """Call before the backward pass of an optimizer step's last micro-batch."""
        for bucket in self.buckets:
            bucket.missing, bucket.work, bucket.flat = set(bucket.places), None, None
        self._active, self._next = True, 0

    def finish(self) -> None:
        """Call after that pass; gradients are then averaged. On a GPU the stream waits for them, the host does not."""
        for bucket in self.buckets[self._next :]:
            self._reduce(bucket)
        for bucket in self.buckets:
            bucket.work.wait()
            if not self._divide_first:
                bucket.flat.mul_(self._share)
            bucket.flat = bucket.work = None  # the gradients hold it
        self._active = False

    @torch.no_grad()
    def _ready(self, parameter: Tensor) -> None:
        if not self._active:
            return
        self._bucket_of[parameter].missing.discard(parameter)
        while self._next < len(self.buckets) and not self.buckets[self._next].missing:
            self._reduce(self.buckets[self._next])
            self._next += 1

    @torch.no_grad()
    def _reduce(self, bucket: _Bucket) -> None:
        first = next(iter(bucket.places))
        # Padding, and the places of absent gradients, are reduced too; nobody reads them.
        bucket.flat = torch.empty(bucket.numel, dtype=first.dtype, device=first.device)
        there = [parameter for parameter in bucket.places if parameter.grad is not None]
        views = [bucket.view(parameter) for parameter in there]
        if there:
            foreach_copy_(views, [parameter.grad for parameter in there])
        for parameter, view in zip(there, views, strict=True):
            parameter.grad = view
        if self._divide_first:
            bucket.flat.mul_(self._share)
        bucket.work = dist.all_reduce(bucket.flat, async_op=True)


def build_reduction(engine, divide_first: bool = False) -> BucketedReduction | None:
    """The reduction for a DeepSpeed engine; None if DeepSpeed does it itself, or with a single rank.

    DeepSpeed always divides before it sums.
    """
    if engine.zero_optimization_stage() or dist.get_world_size() == 1:
        return None
    return BucketedReduction(engine.module.parameters(), divide_first=divide_first)


def backward(engine, loss: Tensor, reduction: BucketedReduction | None) -> None:
    """The engine's backward; after a step's last micro-batch gradients are averaged over all ranks."""
    if reduction is None or not engine.is_gradient_accumulation_boundary():
        engine.backward(loss)
        return
    reduction.open()
    engine.backward(loss)
    reduction.finish()
