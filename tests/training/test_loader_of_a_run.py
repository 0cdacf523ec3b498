"""What a run's configuration asks of its loader."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from unigrad_fast.config import resolve
from unigrad_fast.pipelines import Loader, Manifest
from unigrad_fast.runtime.process_group import World
from unigrad_fast.training.trainer import build_loader


def loader_of(images: Path, device: str, **keys) -> Loader:
    given = {"data": {"train": images, "batch_size": 16, "threads": 1, "decode": "cpu", **keys.pop("data", {})}, **keys}
    world = World(0, 1, 0, 1, torch.device(device), "gloo")
    return build_loader(resolve("cifar_subset", given), world, Manifest.open(images), {})


@pytest.mark.parametrize(("wanted", "share"), [(False, 0.65), (True, 0.0)])
def test_a_run_that_is_to_repeat_has_one_decoder(images, wanted, share):
    assert loader_of(images, "cpu", engine={"deterministic": wanted}).hw_decoder_load == share


def test_files_are_read_in_as_many_threads_and_as_far_ahead_as_is_asked_for(images):
    assert loader_of(images, "cpu").read_threads == 32
    assert loader_of(images, "cpu", data={"read_threads": 5}).read_threads == 5
    assert loader_of(images, "cpu").ahead > loader_of(images, "cpu", data={"read_ahead": 0}).ahead == 2


@pytest.mark.parametrize(("device", "pinned"), [("cpu", False), ("cuda", True)])
def test_views_that_the_cpu_makes_for_a_gpu_are_pinned(images, device, pinned):
    loader = loader_of(images, device)
    assert (loader.device_id, loader.pinned) == (None, pinned)
