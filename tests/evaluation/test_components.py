"""The number of principal components of features."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from unigrad_fast.evaluation import components
from unigrad_fast.evaluation.components import principal_components
from unigrad_fast.evaluation.features import LeftOut
from unigrad_fast.evaluation.rows import Features, halved
from unigrad_fast.runtime.process_group import World

IMAGES, WIDTH = 60, 12
ALONE = World(0, 1, 0, 1, torch.device("cpu"), "gloo")


def rows(seed: int = 0, images: int = IMAGES) -> torch.Tensor:
    """Features whose directions differ in variance."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(images, WIDTH, generator=generator) * torch.linspace(0.1, 3, WIDTH) + 1


def features(found: torch.Tensor, failed: tuple[int, ...] = (), rank: int = 0, ranks: int = 1) -> Features:
    lost = np.array(sorted(failed), np.int64)
    own = np.arange(rank, len(found), ranks)
    part = halved(found[own[~np.isin(own, lost)]]).numpy()
    return Features(len(found), ranks, {rank: part}, lost, LeftOut(len(lost), len(found), None))


def by_singular_values(found: torch.Tensor) -> int:
    unit = found.double() / found.double().norm(dim=1, keepdim=True)
    shares = np.linalg.svd((unit - unit.mean(0)).numpy(), compute_uv=False) ** 2
    held, total = 0.0, shares.sum()
    for number, share in enumerate(shares, start=1):
        held += share
        if held > 0.9 * total:
            return number
    raise AssertionError


@pytest.mark.parametrize("seed", range(5))
def test_components_are_the_squares_of_the_singular_values_that_first_exceed_nine_tenths(seed):
    found = rows(seed)
    assert principal_components(features(found), ALONE) == by_singular_values(found)


@given(st.integers(1, WIDTH).filter(lambda count: count != 10))  # of ten, nine hold 90 % up to rounding
def test_features_in_as_many_directions_have_as_many_components(count):
    """2·count unit vectors ± along the axes: every direction holds 1/count of the variance."""
    axes = torch.eye(WIDTH)[:count]
    expected = next(number for number in range(1, count + 1) if 10 * number > 9 * count)
    assert principal_components(features(torch.cat([axes, -axes])), ALONE) == expected


def test_equal_features_have_none():
    assert principal_components(features(torch.ones(8, WIDTH)), ALONE) == 0


def test_the_sample_is_every_so_many_images_and_images_that_failed_are_left_out(monkeypatch):
    monkeypatch.setattr(components, "SAMPLE", 20)
    found = rows()
    sampled = torch.tensor([place for place in range(0, IMAGES, 3) if place not in (6, 7)])
    found[[1, 7]] = 1e4  # not in the sample, or failed
    assert principal_components(features(found, (6, 7)), ALONE) == by_singular_values(found[sampled])


def on_a_rank(seed: int) -> int:
    rank, size = dist.get_rank(), dist.get_world_size()
    world = World(rank, size, rank, size, torch.device("cpu"), "gloo")
    return principal_components(features(rows(seed), (5,), rank, size), world)


def test_ranks_count_together_what_one_does(workers):
    for seed in range(3):
        expected = principal_components(features(rows(seed), (5,)), ALONE)
        assert workers(2).run(on_a_rank, seed) == [expected] * 2
