"""CutMix (Yun et al., 2019) applied to a finished batch, on its device, with stateless random numbers.

In a mixed view, a box of image i is replaced by the same box of its partner. The box covers 1 − λ of the area with
λ ~ Beta(α, α), its centre is uniform over the image, it is clipped at the border, and the ratio is the share of image i
that remains. Partners form a random cycle inside fixed groups of neighbouring images of the global batch, so no image
is its own partner and nothing depends on the number of ranks.

Shapes: N images of a rank, S the side of a view.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from .errors import DataError
from .philox import CUTMIX, philox
from .shortened import Shortened

VIEWS = 2  # the global ones
STEPS = 4096  # of the table for the Beta distribution


@dataclass(frozen=True)
class CutMix:
    """Which images are mixed, and how much.

    Attributes:
        probability: share of the images that are mixed, view by view.
        alpha: α of the Beta distribution; 1 is uniform, as in the CutMix paper.
        group: images that may be partners; divides the images of a rank and micro-batch.
    """

    probability: float = 1.0
    alpha: float = 1.0
    group: int = 16

    def __post_init__(self) -> None:
        if not 0 <= self.probability <= 1:
            raise DataError(f"CutMix probability {self.probability} is not a probability; use 0 to 1")
        if not 0 < self.alpha < np.inf:
            raise DataError(f"CutMix alpha {self.alpha} is not positive; use 1, or 0.2 to 2")
        if self.group < 2:
            raise DataError(f"a CutMix group of {self.group} leaves an image without a partner; use 2 or more images")


@dataclass(repr=False)
class Mix(Shortened):
    """How the two global views of a rank's batch are mixed.

    Attributes:
        partner: int64 [2, N], for each view the position of the partner in the batch.
        ratio: fp32 [2, N], share of the area that still shows image i; 1 where it is not mixed.
        box: int64 [2, N, 4], left, top, right and bottom of the pasted box, pixels; empty where it is not mixed.
    """

    partner: Tensor
    ratio: Tensor
    box: Tensor

    def to(self, device: torch.device) -> Mix:
        """A copy on a device, made asynchronously."""
        return Mix(*(each.to(device, non_blocking=True) for each in (self.partner, self.ratio, self.box)))

    def apply(self, views: Sequence[Tensor]) -> list[Tensor]:
        """The mixed views; the given ones, [N, 3, S, S] on the device of this mix, are not changed."""
        mixed = []
        for view, partner, box in zip(views, self.partner, self.box, strict=True):
            left, top, right, bottom = (side[:, None] for side in box.unbind(-1))
            place = torch.arange(view.shape[-1], device=view.device)
            columns, rows = (place >= left) & (place < right), (place >= top) & (place < bottom)
            inside = (rows[:, :, None] & columns[:, None, :]).unsqueeze(1)
            mixed.append(torch.where(inside, view[partner], view))
        return mixed


def draw_mix(settings: CutMix, seed: int, step: int, first: int, count: int, size: int) -> Mix:
    """The mix of some images of a micro-batch, on the CPU.

    Args:
        seed: seed of the run.
        step: micro-batches since the start of the run.
        first: position of the first image in the global micro-batch; a multiple of the group.
        count: N; a multiple of the group.
        size: S of the global views, pixels.
    """
    place = np.arange(first, first + count)
    partners, ratios, boxes = [], [], []
    for view in range(VIEWS):
        bits = philox(seed, step, place, stream=CUTMIX + view, block=np.arange(2)[:, None])  # [4, 2, N]
        order_bits, side_bits = bits[0, 0], bits[1, 0]
        apply, quantile, x, y = (bits[[2, 3, 0, 1], [0, 0, 1, 1]] + 0.5) * 2.0**-32
        partners.append(_cycle(order_bits, settings.group))
        keep = _beta(settings.alpha, quantile, side_bits)
        half = 0.5 * size * np.sqrt(1 - keep)
        low = np.rint(np.stack([x, y]) * size - half).clip(0, size)
        high = np.rint(np.stack([x, y]) * size + half).clip(0, size)
        high = np.where(apply < settings.probability, high, low)
        boxes.append(np.concatenate([low, high]).T)
        ratios.append(1 - (high - low).prod(axis=0) / size**2)
    return Mix(
        torch.from_numpy(np.stack(partners)),
        torch.from_numpy(np.stack(ratios).astype(np.float32)),
        torch.from_numpy(np.stack(boxes).astype(np.int64)),
    )


def _cycle(bits: np.ndarray, group: int) -> np.ndarray:
    """Partner of each of N images: the next one in a random order of its group."""
    order = np.argsort(bits.reshape(-1, group), axis=1, kind="stable")
    partner = np.empty_like(order)
    np.put_along_axis(partner, order, np.roll(order, -1, axis=1), axis=1)
    return (partner + np.arange(len(partner))[:, None] * group).reshape(-1)


def _beta(alpha: float, uniform: np.ndarray, side: np.ndarray) -> np.ndarray:
    """Values of Beta(α, α): its quantiles below 1/2, on the side that the lowest bit chooses."""
    root, share = _half_beta(alpha)
    value = np.interp(uniform, share, root) ** (1 / alpha)
    return np.where(side & 1, 1 - value, value)


@lru_cache(maxsize=4)
def _half_beta(alpha: float) -> tuple[np.ndarray, np.ndarray]:
    """x^α on a grid from 0 to 1/2, and the share of Beta(α, α) below 1/2 that lies below x.

    In x^α the density is (1 − x)^(α−1), which has no pole.
    """
    root = np.linspace(0, 0.5**alpha, STEPS + 1)
    density = (1 - root ** (1 / alpha)) ** (alpha - 1)
    share = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    return root, share / share[-1]
