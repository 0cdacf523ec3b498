"""The kNN probe of a run's images where some of them cannot be used."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from test_features import listed_before_damage
from torch import nn

from unigrad_fast.config import resolve
from unigrad_fast.evaluation.baselines import BASELINES
from unigrad_fast.evaluation.knn import KNNResult
from unigrad_fast.evaluation.knn_probe import KNNProbe
from unigrad_fast.pipelines import Manifest
from unigrad_fast.runtime.errors import RunStopped
from unigrad_fast.runtime.preemption import Preemption
from unigrad_fast.runtime.process_group import World
from unigrad_fast.training.start import Attempt, list_images

DAMAGED = {"train": ["0/3.jpg", "1/2.jpg"], "val": ["1/5.jpg"]}
IMAGES = {"train": 24, "val": 20}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """train and val: two classes of noise around colours that overlap."""
    random = np.random.default_rng(0)
    for part, count in IMAGES.items():
        for number in range(count):
            label = number % 2
            folder = tmp_path / part / str(label)
            folder.mkdir(parents=True, exist_ok=True)
            colour = 120 + 12 * label + random.normal(0, 12, 3)
            pixels = colour + random.normal(0, 20, (24, 24, 3))
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / f"{number // 2}.jpg", quality=95)
    return tmp_path


def probe_of(data: Path, max_bad_fraction: float = 0.1, k: int | None = None) -> KNNProbe:
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    folders = {"train": data / "train", "val": data / "val"}
    limits = {"threads": 1, "image_size": 16, "max_bad_fraction": max_bad_fraction}
    judging = {"batch_size": 4} | ({"knn.k": k} if k else {})
    config = resolve("cifar_subset", {"data": folders | limits, "evaluation": judging})
    world = World(rank, size, rank, size, torch.device("cpu"), "gloo")
    manifests = [Manifest.from_folder(folder) for folder in folders.values()]
    return KNNProbe(config.data, config.evaluation, world, *manifests)


def mean_colour() -> nn.Module:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())


def judged(data: Path, max_bad_fraction: float = 0.1) -> dict[str, KNNResult]:
    """The results of the mean colour, and of the baselines."""
    probe = probe_of(data, max_bad_fraction)
    results = {"mean": probe(mean_colour(), None)}
    return results | {name: probe(module, None, size, 1.0) for name, (module, size) in BASELINES.items()}


def damage(data: Path) -> None:
    for part, names in DAMAGED.items():
        listed_before_damage(data / part, *names)


def without_damaged(data: Path) -> dict[str, KNNResult]:
    """What is judged when the files are gone."""
    for part, names in DAMAGED.items():
        for name in names:
            (data / part / name).unlink()
    return judged(data)


@pytest.mark.parametrize("ranks", [1, 2])
def test_accuracy_is_that_of_the_images_that_can_be_used(data, workers, ranks):
    damage(data)
    made = workers(ranks).run(judged, data)
    expected = without_damaged(data)
    assert 40 < expected["mean"].accuracy < 100
    for results in made:
        assert results.keys() == {"mean", "raw pixels", "colour histogram"}
        for name, result in results.items():
            assert (result.queries, result.bank) == (19, 22)
            assert (result.accuracy, result.k) == (expected[name].accuracy, 20)
            bank, queries = result.left_out
            assert bank.startswith(
                f"2 of 24 training images could not be used and were left out, first {data}/train/0/3.jpg: "
            )
            assert queries.startswith(
                f"1 of 20 validation images could not be used and was left out, {data}/val/1/5.jpg: "
            )
            assert expected[name].left_out == ()


def stopped(data: Path) -> str:
    with pytest.raises(RunStopped) as error:
        judged(data, max_bad_fraction=0.0)
    return str(error.value)


@pytest.mark.parametrize("ranks", [1, 2])
def test_too_many_unusable_images_stop_all_ranks(data, workers, ranks):
    damage(data)
    messages = workers(ranks).run(stopped, data)
    start = f"2 of 24 images cannot be used, more than data.max_bad_fraction = 0 allows, first {data}/train/0/3.jpg"
    assert messages[0].startswith(start) and len(set(messages)) == 1


def result_of_k(data: Path, k: int) -> KNNResult:
    return probe_of(data, k=k)(mean_colour(), None)


@pytest.mark.parametrize("ranks", [1, 2])
def test_in_a_run_with_fewer_images_than_k_all_of_them_vote(data, workers, ranks):
    damage(data)
    many, all_of_them = (workers(ranks).run(result_of_k, data, k) for k in (24, 22))
    assert many == all_of_them and many[0].k == 22


def test_a_run_with_fewer_images_than_k_says_so_when_it_begins(data):
    probe = probe_of(data, k=25)
    with Preemption() as preemption:
        attempt = Attempt(preemption, numbered=False)
        attempt.world = probe.world
        settings = resolve("cifar_subset", {"data": probe.data, "evaluation": probe.settings})
        list_images(settings, attempt, None)
        assert attempt.warnings == ["evaluation.knn.k = 25: exceeds the 24 training images, so all of them vote"]
    assert probe_of(data, k=24).few_images(24) is None
