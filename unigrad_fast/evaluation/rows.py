"""Rows of features in half precision, one for each image that could be used.

A row is the feature over a power of two, such that its largest element is in [1/2, 1), and the exponent of this power
as one more element: no feature is too large or too small, and a row loses what rounding to half precision loses. Of a
pass by several ranks, rank r has the rows of the images r, r + ranks, ... that could be used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from unigrad_fast.evaluation.features import LeftOut
from unigrad_fast.runtime.process_group import World

BLOCK = 1 << 13  # rows in memory at once


def halved(features: Tensor) -> Tensor:
    """Features fp32 [n, D] in half precision over a power of two for each, and its exponent: fp16 [n, D + 1]."""
    exponent = torch.frexp(features.abs().amax(dim=1, keepdim=True)).exponent.clamp(-126, 127)
    return torch.cat([torch.ldexp(features, -exponent), exponent.float()], dim=1).half()


def restored(rows: Tensor) -> Tensor:
    """Features fp32 [n, D] of rows that `halved` made."""
    return torch.ldexp(rows[:, :-1].float(), rows[:, -1:].int())


@dataclass(frozen=True)
class Features:
    """The features of a set of images, of which this rank can read its own, or all if they are on the disk.

    Attributes:
        images: number of images.
        ranks: of the pass.
        parts: rows fp16 [n, D + 1] by rank of the pass.
        failed: int64, ascending, positions of the images that could not be used.
        left_out: these, over all ranks.
    """

    images: int
    ranks: int
    parts: Mapping[int, np.ndarray]
    failed: np.ndarray
    left_out: LeftOut

    def usable(self, rank: int = 0, ranks: int = 1) -> np.ndarray:
        """Positions of the images of one of several ranks that have features, int64 ascending."""
        own = np.arange(rank, self.images, ranks)
        return own[~np.isin(own, self.failed)]

    def rows(self, positions: np.ndarray) -> Tensor:
        """Rows, fp16 [n, D + 1] on the CPU, of usable images."""
        found = np.empty((len(positions), self.width + 1), np.float16)
        for rank, part in self.parts.items():
            here = positions % self.ranks == rank
            lost = self.failed[self.failed % self.ranks == rank]
            found[here] = part[positions[here] // self.ranks - np.searchsorted(lost, positions[here])]
        return torch.from_numpy(found)

    def blocks(self, positions: np.ndarray) -> Iterator[tuple[np.ndarray, Tensor]]:
        """Positions and their rows, some at a time."""
        return ((block, self.rows(block)) for block in blocks(positions))

    def batches(self, world: World) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's features, fp32 [n, D] on its device, and their positions, int64 [n] on the CPU."""
        for positions, rows in self.blocks(self.usable(world.rank, world.size)):
            yield restored(rows.to(world.device)), torch.from_numpy(positions)

    def own(self, world: World) -> Tensor:
        """This rank's features, fp32 [n, D] on the CPU."""
        positions = self.usable(world.rank, world.size)
        features = torch.empty(len(positions), self.width)
        start = 0
        for _, rows in self.blocks(positions):
            features[start : start + len(rows)] = restored(rows)
            start += len(rows)
        return features

    @property
    def width(self) -> int:
        return next(iter(self.parts.values())).shape[1] - 1


def blocks(positions: np.ndarray) -> Iterator[np.ndarray]:
    """As many positions as rows fit into memory, at a time."""
    return (positions[start : start + BLOCK] for start in range(0, len(positions), BLOCK))
