"""Bytes and FLOPs of batch norm's kernels by count, alone and over a network, beside those of cuDNN and eager torch.

Counted per element of the normalised tensor, in bf16: every tensor of images once per kernel that reads or writes it,
the ReLU's mask as a bit. What has one number per channel is left out, but in `settle_bytes`, which moves nothing else.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import torch
from torch import nn

from unigrad_fast.dry_run.cards import Card
from unigrad_fast.networks.backbones import build_backbone
from unigrad_fast.networks.batch_norm import GroupedBatchNorm, convert
from unigrad_fast.networks.residual import fuse

X, BIT = 2.0, 1 / 8  # bytes of an element of a tensor, and of the mask
VECTOR = {"h100": 67e12, "a100": 19.5e12}  # FLOP/s in fp32 outside the matrix units, by the data sheets


class Fusion(NamedTuple):
    """What follows a norm in its kernel."""

    relu: bool
    residual: bool
    twice: bool = False
    pool: bool = False

    @property
    def mask(self) -> float:
        """Bytes of what backward has to know of the ReLU, or of the pooling: a byte for a window of four elements."""
        return 1 / 4 if self.pool else BIT * (self.relu and self.residual)


FUSIONS = {
    "nothing": Fusion(relu=False, residual=False),
    "ReLU": Fusion(relu=True, residual=False),
    "ReLU, max-pool": Fusion(relu=True, residual=False, pool=True),
    "add, ReLU": Fusion(relu=True, residual=True),
    "add, ReLU, two branches": Fusion(relu=True, residual=True, twice=True),
}


class Count(NamedTuple):
    """Of a kernel, per element."""

    bytes: float
    flops: int

    @property
    def intensity(self) -> float:
        return self.flops / self.bytes

    def least_seconds(self, elements: int, card: str) -> float:
        figures = Card.of(card)
        moved, computed = self.bytes * elements / figures.memory, self.flops * elements / VECTOR[card]
        return max(figures.launch, moved, computed)


def statistics() -> Count:
    """x is read; a difference to the shift, its sum and that of its square."""
    return Count(X, 4)


def normalise(fusion: Fusion) -> Count:
    """x and the residual are read, y and the mask written; two products, two sums, and what follows. With max-pool y
    has a quarter of the elements, each from nine of x, which are compared."""
    if fusion.pool:
        return Count(X * 5 / 4 + fusion.mask, 9 * 6 // 4)
    return Count(X * (2 + fusion.residual) + fusion.mask, 4 + fusion.residual + fusion.relu)


def sums(fusion: Fusion) -> Count:
    """x, the mask and dy are read, the latter from both branches if there are two, and what the mask leaves of dy is
    written; x̂, three operations for what the ReLU lets through where nothing says it, sums."""
    again = 3 * (fusion.relu and not fusion.mask)
    if fusion.pool:
        return Count(X * 5 / 4 + fusion.mask, 2 + 4 + 3)
    tensors = 2 + fusion.twice + (fusion.relu and fusion.residual)
    return Count(X * tensors + fusion.mask, 2 + fusion.twice + again + 3)


def gradient(fusion: Fusion) -> Count:
    """dy, masked already if there is a mask, and x are read and dx written; else as `sums` up to the ReLU."""
    if fusion.pool:
        return Count(X * 9 / 4 + fusion.mask, 2 + 4 + 4)
    return Count(X * 3, 2 + 3 * (fusion.relu and not fusion.mask) + 4)


def settle_bytes(ranks: int, groups: int, channels: int) -> int:
    """Two float64 per rank, group and channel and one per rank and group read, mean and variance written, two running
    buffers read and written, and the rows of each group and the counter of batches."""
    return 8 * ranks * groups * (2 * channels + 1) + 8 * groups * channels + 16 * channels + 8 * groups + 16


def ours(fusion: Fusion) -> tuple[float, float]:
    """Bytes per element forward and backward."""
    forward = statistics().bytes + normalise(fusion).bytes
    return forward, sums(fusion).bytes + gradient(fusion).bytes


def eager(fusion: Fusion) -> tuple[float, float]:
    """The same of cuDNN's batch norm, which reads its input twice in either direction, and torch's operators after it.

    The addition in place reads two tensors and writes one, and passes its gradient on as it is; the ReLU in place reads
    and writes one, and in the backward pass reads dy and y and writes one; adding the gradients of two branches reads
    two tensors and writes one. Max-pool reads y and writes a quarter of it and as many int64; in the backward pass it
    reads those and writes one tensor.
    """
    forward = 3 * X + 3 * X * fusion.residual + 2 * X * fusion.relu + (X * 5 / 4 + 2) * fusion.pool
    return forward, 5 * X + 3 * X * fusion.relu + 3 * X * fusion.twice + (X * 5 / 4 + 2) * fusion.pool


def elements(backbone: str, image_size: int) -> Counter[Fusion]:
    """Numbers that a backbone normalises per image, by what follows."""
    found: Counter[Fusion] = Counter()

    def count(module: nn.Module, arguments, keywords, output) -> None:
        residual, twice = keywords.get("residual") is not None, keywords.get("twice", False)
        stem = module is network.bn1  # whose kernel has the max-pool too
        found[Fusion(keywords.get("relu", False), residual, twice, stem)] += arguments[0][0].numel()

    with torch.device("meta"):
        network = build_backbone(backbone)
        convert(network, synchronised=False)
        fuse(network, nn.Sequential())
        for module in network.modules():
            if isinstance(module, GroupedBatchNorm):
                module.register_forward_hook(count, with_kwargs=True)
        network(torch.empty(2, 3, image_size, image_size))
    return found
