"""Ranks see the same images, or fail together."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from PIL import Image

from unigrad_fast.config import resolve
from unigrad_fast.images.manifests import are_the_same, identity, read_manifests
from unigrad_fast.pipelines import Manifest
from unigrad_fast.runtime.errors import DataError
from unigrad_fast.runtime.process_group import World


def read(folders: list[str], val: str | None = None) -> str:
    """What reading this rank's folder gives: a summary, or the error."""
    rank, size = dist.get_rank(), dist.get_world_size()
    config = resolve("quickstart", {"data": {"train": folders[rank], "val": val}})
    try:
        train, val, said = read_manifests(config, World(rank, size, rank, size, torch.device("cpu"), "gloo"))
    except DataError as error:
        return f"DataError: {error}"
    return f"{len(train)} images, {val and len(val)} to validate, {said}"


def folder(root: Path, names: list[str], size: int = 8) -> str:
    root.mkdir(parents=True)
    for name in names:
        (root / name).parent.mkdir(exist_ok=True)
        Image.new("RGB", (size, size)).save(root / name)
    return str(root)


def test_equal_copies_on_two_machines_are_the_same_images(workers, tmp_path):
    names = ["a/1.jpg", "b/1.jpg", "b/2.jpg"]
    copies = [folder(tmp_path / "one", names), folder(tmp_path / "two", names)]
    for file in Path(copies[1]).rglob("*.jpg"):
        os.utime(file, (1, 1))  # copied without their times
    assert workers(2).run(read, copies) == ["3 images, None to validate, []"] * 2
    val = folder(tmp_path / "val", names)
    assert workers(2).run(read, copies, val) == ["3 images, 3 to validate, []"] * 2


@pytest.mark.parametrize("other", [["a/1.jpg"], ["a/1.jpg", "a/3.jpg"]])
def test_different_images_are_refused_on_all_ranks(workers, tmp_path, other):
    folders = [folder(tmp_path / "one", ["a/1.jpg", "a/2.jpg"]), folder(tmp_path / "two", other)]
    for rank, message in enumerate(workers(2).run(read, folders)):
        assert message.startswith(f"DataError: {folders[rank]}: ranks 0 and 1 see different images")


@pytest.mark.parametrize("broken", [0, 1])
def test_a_folder_that_one_rank_cannot_read_fails_on_all(workers, tmp_path, broken):
    folders = [folder(tmp_path / str(rank), ["a/1.jpg"] if rank != broken else []) for rank in range(2)]
    first, second = workers(2).run(read, folders)
    assert first == second
    assert first.startswith(f"DataError: {folders[broken]} holds no files")


def test_warnings_are_handed_on_instead_of_printed(workers, tmp_path):
    images = folder(tmp_path / "one", ["a/1.jpg", "stray.jpg"])
    (said,) = workers(1).run(read, [images])
    assert "1 images lie directly in" in said


def test_validation_images_that_are_trained_on_are_warned_of(workers, tmp_path):
    images = folder(tmp_path / "one", ["a/1.jpg", "b/1.jpg"])
    (tmp_path / "link").symlink_to(images)
    for val in (images, str(tmp_path / "link")):
        (said,) = workers(1).run(read, [images], val)
        assert f"data.val = {val}: is data.train as well, so every image finds itself" in said


def test_images_are_known_again_though_a_few_changed_but_not_as_smaller_copies(tmp_path):
    for number in range(30):
        Image.new("RGB", (20 + number, 16)).save(tmp_path / f"{number:02}.png")
    remembered = identity(Manifest.open(tmp_path, cache=tmp_path / ".cache"))
    assert are_the_same(json.loads(json.dumps(remembered)), Manifest.open(tmp_path))

    (tmp_path / "07.png").write_bytes(b"")
    Image.new("RGB", (5, 5)).save(tmp_path / "09.png")
    damaged = Manifest.open(tmp_path)
    assert len(damaged.unreadable()) == 1 and are_the_same(remembered, damaged)
    assert are_the_same(identity(damaged), Manifest.open(tmp_path)), "and the other way round, when it is repaired"

    for path in tmp_path.glob("*.png"):
        Image.new("RGB", (10, 8)).save(path)
    assert not are_the_same(remembered, Manifest.open(tmp_path))


def test_images_of_other_names_are_others(tmp_path):
    for name in "ab":
        Image.new("RGB", (20, 16)).save(tmp_path / f"{name}.png")
    remembered = identity(Manifest.open(tmp_path))
    (tmp_path / "b.png").rename(tmp_path / "c.png")
    assert not are_the_same(remembered, Manifest.open(tmp_path))
