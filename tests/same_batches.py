"""Batches of a manifest, and that those of two are the same."""

import torch

from unigrad_fast.pipelines import Loader, Manifest


def batches(manifest: Manifest, rank: int = 0, world_size: int = 1, start: int = 0, count: int = 2) -> list:
    loader = Loader(manifest, "simsiam", 16, 3, rank, world_size, image_size=16, threads=1)
    return list(loader.iterate(start, start + count))


def assert_same(left: list, right: list) -> None:
    """Bitwise, with the same images replaced."""
    for one, other in zip(left, right, strict=True):
        assert one.step == other.step and one.replaced.tolist() == other.replaced.tolist()
        for a, b in zip((one.index, one.label, *one.views), (other.index, other.label, *other.views), strict=True):
            assert torch.equal(a, b)
