"""Ranks see the same images, or fail together."""

from __future__ import annotations

import json
import os
import sys
import tarfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from PIL import Image
from worker_group import WorkerGroup

from unigrad_fast.config import Data, resolve
from unigrad_fast.images import manifests
from unigrad_fast.images.manifests import difference, digest, identity, read_manifests, same_images
from unigrad_fast.pipelines import Manifest
from unigrad_fast.runtime.errors import DataError
from unigrad_fast.runtime.process_group import World


def read(folders: list[str], val: str | None = None) -> str:
    """What reading this rank's folder gives: a summary, or the error."""
    rank, size = dist.get_rank(), dist.get_world_size()
    config = resolve("quickstart", {"data": {"train": folders[rank], "val": val}})
    try:
        train, val, said = read_manifests(config.data, World(rank, size, rank, size, torch.device("cpu"), "gloo"))
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
        assert message.startswith(
            f"DataError: {folders[rank]}: ranks 0 and 1 see different images (2 and {len(other)}); "
        )


@pytest.mark.parametrize("broken", [0, 1])
def test_a_folder_that_one_rank_cannot_read_fails_on_all(workers, tmp_path, broken):
    folders = [folder(tmp_path / str(rank), ["a/1.jpg"] if rank != broken else []) for rank in range(2)]
    first, second = workers(2).run(read, folders)
    assert first == second
    assert first.startswith(f"DataError: {folders[broken]} holds no files")


def test_an_image_that_is_gone_is_as_bad_among_those_that_are_compared_as_elsewhere(workers, tmp_path):
    images = folder(tmp_path / "one", [f"a/{number}.jpg" for number in range(3)] + ["b/1.jpg"])
    for name in ("a/0.jpg", "b/1.jpg"):  # the first and the last are compared
        Path(images, name).unlink()
        Path(images, name).symlink_to("/nowhere")
    assert workers(2).run(read, [images] * 2) == ["4 images, None to validate, []"] * 2


def test_warnings_are_handed_on_instead_of_printed(workers, tmp_path):
    images = folder(tmp_path / "one", ["a/1.jpg", "stray.jpg"])
    (said,) = workers(1).run(read, [images])
    assert "1 images lie directly in" in said


def test_validation_images_that_are_training_images_are_warned_of(tmp_path):
    images, link = tmp_path / "images", tmp_path / "link"
    images.mkdir()
    link.symlink_to(images)
    for val in (images, link):
        (said,) = same_images(Data(train=images, val=val), "each finds itself")
        assert said.startswith(f"data.val = {val}: is the same as data.train, so each finds itself and the accuracy ")
    for data in (Data(train=images, val=tmp_path), Data(train=images), Data()):
        assert same_images(data, "each finds itself") == []


def test_images_are_known_again_though_a_few_changed_but_not_as_smaller_copies(tmp_path):
    for number in range(30):
        Image.new("RGB", (20 + number, 16)).save(tmp_path / f"{number:02}.png")
    remembered = identity(Manifest.open(tmp_path, cache=tmp_path / ".cache"))
    assert difference(json.loads(json.dumps(remembered)), Manifest.open(tmp_path)) is None

    (tmp_path / "07.png").write_bytes(b"")
    Image.new("RGB", (5, 5)).save(tmp_path / "09.png")
    damaged = Manifest.open(tmp_path)
    assert len(damaged.unreadable()) == 1 and difference(remembered, damaged) is None
    assert difference(identity(damaged), Manifest.open(tmp_path)) is None, (
        "and the other way round, when it is repaired"
    )

    for path in tmp_path.glob("*.png"):
        Image.new("RGB", (10, 8)).save(path)
    said = "30 images then, 30 now; 00.png had 20 x 16 pixels and has 10 x 8"
    assert difference(remembered, Manifest.open(tmp_path)) == said


def test_of_other_images_the_number_and_the_first_that_is_gone_or_new_is_said(tmp_path, monkeypatch):
    names = ["a.png", "b.png", "c\udcff.png"]
    images = folder(tmp_path / "images", names)
    remembered = json.loads(json.dumps(identity(Manifest.open(images))))
    (tmp_path / "images/b.png").rename(tmp_path / "images/d.png")
    assert difference(remembered, Manifest.open(images)) == "3 images then, 3 now; b.png is gone"
    (tmp_path / "images/d.png").unlink()
    assert difference(remembered, Manifest.open(images)) == "3 images then, 2 now; b.png is gone"
    more = folder(tmp_path / "more", [*names, "bb.png"])
    assert difference(remembered, Manifest.open(more)) == "3 images then, 4 now; bb.png is new"
    (tmp_path / "more/list.txt").write_bytes(b"\n".join(map(os.fsencode, reversed(names))))
    reordered = Manifest.open(tmp_path / "more/list.txt")
    assert difference(remembered, reordered) == "3 images then, 3 now; their names or their order differ"
    early = {key: remembered[key] for key in ("names", "sizes")}
    assert difference(early, reordered) == "their names, number or sizes in pixels differ"
    monkeypatch.setattr(manifests, "SAMPLED", 2)
    remembered = identity(Manifest.open(images))
    assert "is new" not in difference(remembered | {"count": 3}, Manifest.open(more)), "not all are known"


def looks(work: Callable[[], object]) -> dict[str, int]:
    """How often some work of this process asks for the state of files, lists folders and opens images."""
    counts = {"stat": 0, "scandir": 0, "open": 0}

    def counted(name: str, function: Callable) -> Callable:
        def call(*given, **named):
            counts[name] += 1
            return function(*given, **named)

        return call

    def audit(event: str, given: tuple) -> None:
        # With an opener of its own, Python's `open` is followed by that of the system, which has no mode.
        if watching and event == "open" and given[1] is not None and os.fsdecode(given[0]).endswith(".png"):
            counts["open"] += 1

    watching = [True]
    sys.addaudithook(audit)  # there is no way to remove it
    names = {"stat": os.stat, "lstat": os.lstat, "scandir": os.scandir}
    with ExitStack() as stack:
        for name, function in names.items():
            stack.enter_context(mock.patch.object(os, name, counted(name.removeprefix("l"), function)))
        work()
    watching.clear()
    return counts


def reading_of_two_nodes(folder: str) -> tuple[dict[str, int], str]:
    """What this rank of eight asks of the file system while the images are read, and what it gets."""
    rank = dist.get_rank()
    config, got = resolve("quickstart", {"data": {"train": folder, "val": None}}), []
    world = World(rank, 8, rank % 4, 4, torch.device("cpu"), "gloo")
    counts = looks(lambda: got.append(read_manifests(config.data, world)[0]))
    return counts, f"{digest(got[0])} {got[0].labels.sum()} {got[0].path(9_999)}"


def test_one_of_eight_ranks_looks_at_ten_thousand_files(tmp_path, monkeypatch):
    monkeypatch.setenv("UNIGRAD_CACHE", str(tmp_path / "cache"))
    image = folder(tmp_path / "images", ["a/0.png"]) + "/a/0.png"
    for number in range(1, 10_000):
        place = tmp_path / "images" / "abcd"[number % 4]
        place.mkdir(exist_ok=True)
        os.link(image, place / f"{number}.png")
    group = WorkerGroup(8)
    try:
        for cached in (False, True):
            counts, got = zip(*group.run(reading_of_two_nodes, str(tmp_path / "images")), strict=True)
            assert len(set(got)) == 1
            first, *others = counts
            assert 10_000 <= first["stat"] < 10_100 and first["scandir"] < 20
            assert first["open"] == (0 if cached else 10_000)
            assert sum(each["stat"] for each in others) < 100, "only one rank of the second node looks at some"
            assert not any(each["open"] or each["scandir"] for each in others)
    finally:
        group.close()


def read_beside_a_copy(source: str) -> tuple[int, int]:
    """The second of two nodes sees another file at the path; how often a rank lists, and what it can read there."""
    rank = dist.get_rank()
    opened, traces = Manifest.open, manifests._traces
    listings = []

    def listing(folder: Path) -> Manifest:
        listings.append(folder)
        return opened(folder)

    def elsewhere(manifest: Manifest) -> list:
        for path in Path(source).iterdir():
            os.utime(path, (7, 7))
        return traces(manifest)

    config = resolve("quickstart", {"data": {"train": source, "val": None}})
    with (
        mock.patch.object(Manifest, "open", listing),
        mock.patch.object(manifests, "_traces", elsewhere if rank else traces),
    ):
        train, _, _ = read_manifests(config.data, World(rank, 2, 0, 1, torch.device("cpu"), "gloo"))
    return len(listings), len([train.read(image) for image in range(len(train) if rank else 0)])


def test_a_node_with_a_copy_of_its_own_lists_it_and_reads_its_shards(workers, tmp_path):
    images = folder(tmp_path / "images", ["a/1.jpg", "b/2.jpg"])
    (tmp_path / "shards").mkdir()
    with tarfile.open(tmp_path / "shards" / "one.tar", "w") as tar:
        tar.add(images, "images")
    assert workers(2).run(read_beside_a_copy, str(tmp_path / "shards")) == [(1, 0), (1, 2)]


def test_shards_of_other_sizes_on_another_node_are_refused(tmp_path):
    images = folder(tmp_path / "images", ["a/1.jpg", "b/2.jpg"])
    with tarfile.open(tmp_path / "one.tar", "w") as tar:
        tar.add(images, "images")
    shards = Manifest.open(tmp_path / "one.tar", cache=tmp_path / "cache").storage
    with open(tmp_path / "one.tar", "ab") as file:
        file.write(bytes(512))
    with pytest.raises(DataError, match=r"one\.tar: has another size here than on rank 0; give all machines the same"):
        shards.found_again()
