"""The number of principal components of features, which tells how far their dimensions are decorrelated.

The paper's figure "Learning trajectory for different methods", (d): "We apply PCA to representations, and count the
number of eigenvalues whose cumulative sum first exceeds 90%".
"""

from __future__ import annotations

import torch
from torch import Tensor

from unigrad_fast.evaluation.knn import over_ranks
from unigrad_fast.evaluation.rows import Features, restored
from unigrad_fast.evaluation.shares import rounded
from unigrad_fast.runtime.process_group import World

SAMPLE = 2000  # images
VARIANCE = 0.9  # share of it that the components hold


@torch.no_grad()
def principal_components(features: Features, world: World) -> int:
    """How many principal components hold 90 % of the variance of the unit features of a sample.

    The sample is every s-th image, at most `SAMPLE` of all. All ranks call this together and get the same: elements are
    rounded to integers as in `shares`, so that every sum is exact.

    Args:
        features: of the training images; of each rank's own.
    """
    stride = max(1, -(-features.images // SAMPLE))
    own = features.usable(world.rank, world.size)
    row_ND = rounded(restored(features.rows(own[own % stride == 0]).to(world.device))).double()
    count = row_ND.new_full((1, row_ND.shape[1]), len(row_ND))
    sums = over_ranks(torch.cat([row_ND.T @ row_ND, row_ND.sum(0, keepdim=True), count]), world)
    return components_of(sums[:-2], sums[-2], sums[-1, 0])


def components_of(squares_DD: Tensor, sum_D: Tensor, count: Tensor) -> int:
    """The number of a covariance's largest eigenvalues whose sum first exceeds 90 % of all; 0 without variance.

    Args:
        squares_DD: Σ x·xᵀ, float64; sum_D: Σ x; count: rows.
    """
    covariance_DD = count * squares_DD - torch.outer(sum_D, sum_D)  # times count²
    value_D = torch.linalg.eigvalsh(covariance_DD).flip(0).clamp_min(0)
    held_D = value_D.cumsum(0)
    return int((held_D <= VARIANCE * held_D[-1]).sum()) + 1 if held_D[-1] > 0 else 0
