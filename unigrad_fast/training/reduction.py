"""Gradients averaged over the ranks in buckets, while backward still computes those of earlier layers.

For ZeRO stage 0, where DeepSpeed would flatten all gradients after backward, reduce them at once and copy them back.
Here each is copied once, into its bucket, and is from then on a view of it. Buckets are filled from the last layer to
the first, as backward goes, and reduced in that order on every rank, whatever becomes ready first; nothing else tells
the ranks how to meet. Sums of two ranks do not depend on buckets; of three and more their order does, and with it the
rounding.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from unigrad_fast.runtime.torch_private import foreach_copy_

BUCKET_BYTES = 25_000_000  # as DDP has it: large enough for bandwidth, small enough to begin early
ALIGNMENT = 64  # elements: gradients begin where 128-bit accesses may


@dataclass
class _Bucket:
    """Parameters whose gradients lie side by side, in the order of backward.

    Attributes:
        places: first element of each, by parameter.
        missing: parameters whose gradient backward has not given yet.
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
        """The parameter's gradient in the bucket, laid out as the parameter."""
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
        parameters: trained ones in the order of the forward pass, the same on all ranks. All ranks have gradients of
            the same ones; one without a gradient stays without.
        bucket_bytes: from which on a bucket is full.
    """

    def __init__(self, parameters: Iterable[Tensor], bucket_bytes: int = BUCKET_BYTES):
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
        """Before the backward pass whose gradients are reduced: of an optimizer step's last micro-batch."""
        for bucket in self.buckets:
            bucket.missing, bucket.work, bucket.flat = set(bucket.places), None, None
        self._active, self._next = True, 0

    def finish(self) -> None:
        """After it: gradients are those of all ranks. On a GPU the stream waits for them, and the host for nothing."""
        for bucket in self.buckets[self._next :]:
            self._reduce(bucket)
        share = 1.0 / dist.get_world_size()
        for bucket in self.buckets:
            bucket.work.wait()
            bucket.flat.mul_(share)
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
        # What lies between gradients, and in the place of those that are not there, is added up too; nobody reads it.
        bucket.flat = torch.empty(bucket.numel, dtype=first.dtype, device=first.device)
        there = [parameter for parameter in bucket.places if parameter.grad is not None]
        views = [bucket.view(parameter) for parameter in there]
        if there:
            foreach_copy_(views, [parameter.grad for parameter in there])
        for parameter, view in zip(there, views, strict=True):
            parameter.grad = view
        bucket.work = dist.all_reduce(bucket.flat, async_op=True)


def build_reduction(engine) -> BucketedReduction | None:
    """What averages the gradients of a DeepSpeed engine: None where it does so itself, or there is one rank."""
    if engine.zero_optimization_stage() or dist.get_world_size() == 1:
        return None
    return BucketedReduction(engine.module.parameters())


def backward(engine, loss: Tensor, reduction: BucketedReduction | None) -> None:
    """The engine's backward; after a step's last micro-batch gradients are those of all ranks."""
    if reduction is None or not engine.is_gradient_accumulation_boundary():
        engine.backward(loss)
        return
    reduction.open()
    engine.backward(loss)
    reduction.finish()
