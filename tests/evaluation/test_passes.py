"""Rows of features: what half precision keeps of them, and the same rows on any number of ranks, kept or not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from test_features import MeanColour, listed_before_damage
from test_knn_probe import IMAGES, data  # noqa: F401
from torch import Tensor

from unigrad_fast.config import resolve
from unigrad_fast.evaluation.linear import FrozenEncoder
from unigrad_fast.evaluation.passes import Keeper, new_features, read_features
from unigrad_fast.evaluation.rows import halved, restored
from unigrad_fast.evaluation.shares import own_images, share_of
from unigrad_fast.pipelines import Manifest
from unigrad_fast.runtime.process_group import World


@given(st.integers(-120, 120), st.integers(1, 40), st.integers(0, 1000))
def test_a_row_loses_what_half_precision_loses_at_any_scale(scale, width, seed):
    torch.manual_seed(seed)
    features = torch.randn(3, width) * 2.0**scale
    features[1] = 0
    back = restored(halved(features))
    largest = features.abs().amax(dim=1, keepdim=True)
    # Half an ulp: 2^-11 of an element that is normal in half precision, and of the smallest that are not, 2^-25 of one.
    assert ((back - features).abs() <= torch.maximum(2.0**-11 * features.abs(), 2.0**-24 * largest)).all()
    assert torch.equal(halved(back), halved(features))


def encoder_of(folder: Path, lines: list[str], backbone: torch.nn.Module | None = None) -> FrozenEncoder:
    rank, size = dist.get_rank(), dist.get_world_size()
    config = resolve(
        "cifar_subset",
        {
            "data": {"train": folder / "train", "val": folder / "val", "threads": 1, "image_size": 16},
            "evaluation": {"batch_size": 4},
        },
    )
    config = config.model_copy(update={"data": config.data.model_copy(update={"max_bad_fraction": 0.2})})
    world = World(rank, size, rank, size, torch.device("cpu"), "gloo")
    train, val = (Manifest.from_folder(folder / part) for part in ("train", "val"))
    return FrozenEncoder(config, world, train, val, backbone or MeanColour(), None, lines.append)


def keep(folder: Path, kept: Path) -> tuple[Tensor, list[int], Tensor, list[str], int]:
    """This rank's features, their positions, its share for kNN, what was said, and the images that it passed over."""
    lines: list[str] = []
    encoder, keeper = encoder_of(folder, lines), Keeper(kept, {"weights": "a"})
    found = read_features(encoder, encoder.train, "training", keeper)
    positions = found.usable(encoder.world.rank, encoder.world.size)
    share = share_of(found, encoder.train.labels, encoder.world)
    images = sum(count for count, _, _ in encoder.backbone.calls) - (keeper.made > 0)  # one asks for the width
    return found.own(encoder.world), positions.tolist(), share.rows, keeper.told(), images


def fresh(folder: Path) -> tuple[Tensor, Tensor]:
    """This rank's features where nothing is kept, and the share that a run makes while it trains."""
    encoder = encoder_of(folder, [])
    found = read_features(encoder, encoder.train, "training")
    loader = own_images(encoder.train, encoder.config.data, encoder.config.evaluation, encoder.world)
    passed = new_features(MeanColour(), loader, encoder.world, None, 0.2)
    return found.own(encoder.world), share_of(passed, encoder.train.labels, encoder.world).rows


def whole(results: list[tuple], column: int = 0) -> Tensor:
    """The rows of all ranks in the order of the images."""
    order = torch.tensor([position for result in results for position in result[1]]).argsort()
    return torch.cat([result[column] for result in results])[order]


@pytest.mark.parametrize("bad", [[], ["0/3.jpg", "1/2.jpg"]])
def test_kept_rows_are_those_of_a_fresh_pass_on_any_number_of_ranks(data, workers, tmp_path, bad):  # noqa: F811
    listed_before_damage(data / "train", *bad)
    made = {ranks: workers(ranks).run(keep, data, tmp_path / f"kept{ranks}") for ranks in (1, 2, 3)}
    usable = IMAGES["train"] - len(bad)
    for ranks, results in made.items():
        assert sorted(position for result in results for position in result[1]) == made[1][0][1]
        assert len(made[1][0][1]) == sum(result[4] for result in results) == usable
        assert torch.equal(whole(results), made[1][0][0]) and torch.equal(whole(results, 2), made[1][0][2])
        assert results[0][3] == [line.replace("kept1", f"kept{ranks}") for line in made[1][0][3]]
        for other in {1, 2, 3} - {ranks}:  # read by other ranks than those that made them
            again = workers(other).run(keep, data, tmp_path / f"kept{ranks}")
            assert torch.equal(whole(again), made[1][0][0]) and sum(result[4] for result in again) == 0
            assert again[0][3] == [f"features of 24 images were read from {tmp_path}/kept{ranks}"]
        for result, (features, rows) in zip(results, workers(ranks).run(fresh, data), strict=True):
            assert torch.equal(result[0], features) and torch.equal(result[2], rows)


def test_more_ranks_than_images_and_features_of_others_are_no_obstacle(data, workers, tmp_path):  # noqa: F811
    for path in sorted((data / "train").rglob("*.jpg"))[2:]:
        path.unlink()
    results = workers(3).run(keep, data, tmp_path / "kept")
    assert [len(result[1]) for result in results] == [1, 1, 0]
    alone = workers(1).run(keep, data, tmp_path / "kept")
    assert torch.equal(alone[0][0], whole(results)) and alone[0][4] == 0
