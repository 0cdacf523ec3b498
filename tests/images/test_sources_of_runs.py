"""Runs on tables and on Datasets: what a configuration records, resuming, and what is refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import torch
import torch.distributed as dist
import yaml
from drawn_images import draw_tree
from interrupted_run import RECIPE, require_equal
from pyarrow import parquet
from thin import thin

from unigrad_fast import cli
from unigrad_fast.checkpoints.files import Reader, latest
from unigrad_fast.config import Data, resolve, to_yaml
from unigrad_fast.images.manifests import difference, digest, evaluated, identity, read_manifests, same_images
from unigrad_fast.pipelines import Manifest, items, spelling
from unigrad_fast.runtime.errors import DataError, UserError
from unigrad_fast.runtime.process_group import World

STEPS = 6  # of two epochs


class Pictures:
    """A Dataset with the files of a manifest."""

    def __init__(self, files: Manifest, first: int = 0):
        self.files, self.first = files, first
        self.targets, self.classes = files.labels[first:], files.classes

    def __len__(self) -> int:
        return len(self.files) - self.first

    def __getitem__(self, place: int) -> tuple[bytes, int]:
        return self.files.read(self.first + place), int(self.targets[place])


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    """96 labelled JPEG files in two classes."""
    return draw_tree(tmp_path_factory.mktemp("images") / "train", per_class=48)


@pytest.fixture(scope="module")
def table(images, tmp_path_factory) -> Path:
    """A folder with the training images as a Parquet file."""
    folder, files = tmp_path_factory.mktemp("table"), Manifest.open(images)
    content = [files.read(image) for image in range(len(files))]
    labels = [files.classes[label] for label in files.labels]
    rows = pyarrow.table({"image": content, "label": labels})
    parquet.write_table(rows, folder / "train-00000-of-00001.parquet", compression="none")
    return folder


def run(source: str | Path, output: Path, *words: str) -> int:
    recipe = output.with_suffix(".yaml")
    recipe.write_text(RECIPE.format(batch=32, epochs=2))
    with thin():
        given = ("--recipe", str(recipe), "--data.train", str(source), "--output", str(output))
        return cli.main(["pretrain", *given, *words])


@pytest.fixture(scope="module")
def on_files(images, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("runs") / "files"
    assert run(images, output) == 0
    return output


def forget_the_end(output: Path) -> None:
    """Leaves a run as it was before its last checkpoint."""
    *_, before, last = sorted((output / "checkpoints").glob("step-*"))
    shutil.rmtree(last)
    (output / "checkpoints/latest").write_text(before.name)
    (output / "summary.json").unlink()


@pytest.mark.long
def test_a_run_on_a_table_is_that_on_its_files_and_resumes_anywhere(table, on_files, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(table.parent)
    output = tmp_path / "run"
    assert run(f"hf:{table.name}:train", output, "--checkpoint.every", "1") == 0
    assert yaml.safe_load((output / "config.yaml").read_text())["data"]["train"] == f"hf:{table}:train"
    require_equal(output, on_files, STEPS)
    forget_the_end(output)
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    with thin():
        assert cli.main(["pretrain", "--recipe", str(output / "config.yaml")]) == 0
    assert "resuming after step" in capsys.readouterr().out
    require_equal(output, on_files, STEPS)


@pytest.mark.long
def test_a_run_on_a_dataset_is_that_on_its_files_and_needs_it_again(images, on_files, tmp_path, monkeypatch, capsys):
    source, output = items.give(Pictures(Manifest.open(images))), tmp_path / "run"
    assert run(source, output, "--checkpoint.every", "1") == 0
    assert yaml.safe_load((output / "config.yaml").read_text())["data"]["train"] == source
    require_equal(output, on_files, STEPS)
    forget_the_end(output)
    other = items.give(Pictures(Manifest.open(images), first=1))
    for again, now in ((other, other), (images, "files")):
        assert run(again, output) == 2
        assert f"({source} then, {now} now); use the same images" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(items, "_given", {})
        assert run(source, output) == 2
    assert (
        f"{source}: a Dataset that was given from Python, and this process has none like it" in capsys.readouterr().err
    )
    assert run(source, output) == 0
    require_equal(output, on_files, STEPS)


class Broken(Pictures):
    """A Dataset with a bug that shows when one of its items is read in the second epoch."""

    item = 51  # none of those that are sampled
    reads = 0

    def __getitem__(self, place: int) -> tuple[bytes, int]:
        self.reads += place == self.item
        return super().__getitem__(self.first - 1000 if self.reads == 2 else place)


@pytest.mark.long
def test_a_run_on_a_dataset_with_a_bug_saves_and_stops(images, tmp_path, capsys):
    output = tmp_path / "run"
    assert run(items.give(Broken(Manifest.open(images))), output) == 3
    assert "Broken, item 51: IndexError: " in capsys.readouterr().err
    assert Reader(latest(output)).about["step"] >= STEPS // 2


def test_a_configuration_records_sources_that_hold_anywhere(tmp_path, monkeypatch, images):
    monkeypatch.chdir(tmp_path)
    config = resolve("quickstart", {"data": {"train": "hf:a/../sets:train:img", "val": "parquet:~/b.parquet"}})
    home = Path("~").expanduser()
    assert [str(config.data.train), str(config.data.val)] == [
        f"hf:{tmp_path}/sets:train:img",
        f"parquet:{home}/b.parquet",
    ]
    dataset = Pictures(Manifest.open(images))
    config = resolve("quickstart", {"data.train": dataset})
    assert str(config.data.train) == items.give(dataset)
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    monkeypatch.chdir("/")
    assert resolve(tmp_path / "config.yaml").data == config.data


@pytest.mark.parametrize(
    "value, said",
    [
        ({1, 2}, "data.train: a set has no length or no random access"),
        (3, "data.train = 3: must be a path or null"),
        ([1], r"data.train = \[1\]: must be a path"),
        ([Path("images")], r'data.train = \["images"\]: must be a path'),
        ([], r"data.train = \[\]: must be a path"),
        ([("images", 0)], "data.train: list, item 0: a str; return a Pillow image"),
        (np.zeros((2, 8, 8, 3)), "data.train: ndarray, item 0: pixels of type float64; return uint8"),
    ],
)
def test_what_is_no_source_is_refused_with_the_key(value, said):
    with pytest.raises(UserError, match=said):
        resolve("quickstart", {"data": {"train": value}})


def test_a_path_may_hold_colons(tmp_path):
    (tmp_path / "a:b").mkdir()
    assert spelling.divided(f"{tmp_path}/a:b:train", 3) == (f"{tmp_path}/a:b", ["train", "", ""])
    assert spelling.divided(f"{tmp_path}/a:b", 3) == (f"{tmp_path}/a:b", ["", "", ""])
    assert spelling.divided(f"{tmp_path}/none:train::label", 3) == (f"{tmp_path}/none", ["train", "", "label"])
    assert spelling.location(f"hf:{tmp_path}/a:b:train") == tmp_path / "a:b"
    assert spelling.location(tmp_path / "a:b") == tmp_path / "a:b"
    assert spelling.location("dataset:A:1:ab") is None


def test_nothing_is_written_among_the_images_of_a_table(table, tmp_path, capsys):
    for words in (
        ("pretrain", "--data.train", f"hf:{table}", "--data.val", "null", "--output", str(table / "run")),
        ("data", "shard", f"hf:{table}", str(table / "shards")),
    ):
        assert cli.main(list(words)) == 2
        assert "where the output would be read as images; give another place" in capsys.readouterr().err
    assert cli.main(["pretrain", "--data.train", f"hf:{tmp_path}/none:train", "--data.val", "null"]) == 2
    assert f"data.train = hf:{tmp_path}/none:train: no such file or folder" in capsys.readouterr().err


def test_a_table_is_scanned_packed_and_drawn(table, images, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["data", "scan", f"hf:{table}:train"]) == 0
    assert (tmp_path / f"scan-{table.name}-train/manifest.csv").read_text().count("train-00000-of-00001.parquet/") == 96
    assert cli.main(["data", "shard", f"hf:{table}:train", "shards", "--shuffle_seed", "null", "--verify", "true"]) == 0
    packed, files = Manifest.open(tmp_path / "shards"), Manifest.open(images)
    assert [packed.read(i) for i in range(96)] == [files.read(i) for i in range(96)]
    assert packed.labels.tolist() == files.labels.tolist() and packed.classes == files.classes
    assert cli.main(["data", "preview", f"parquet:{table}", "--images", "1"]) == 0
    assert (tmp_path / "preview.png").exists()


def test_the_images_of_a_dataset_are_known_by_its_items(images):
    files = Manifest.open(images)
    one, same, other = (Manifest.open(Pictures(files, first)) for first in (0, 0, 1))
    one.read(0)  # a size that is known does not count
    assert digest(one) == digest(same) and evaluated(one) == evaluated(same)
    assert difference(identity(one), same) is None
    assert digest(one) != digest(other) and evaluated(one) != evaluated(other)
    assert difference(identity(one), other) == f"{one.root} then, {other.root} now"
    remembered = identity(files)
    del remembered["contents"]  # as in earlier checkpoints
    assert difference(remembered, files) is None
    data = Data(train=one.root, val=one.root)
    assert "is the same as data.train" in same_images(data, "x")[0]


def read(images: str, kinds: list[str]) -> str:
    """What this rank reads of the source of a kind: the bytes of an image, or the error."""
    rank, size = dist.get_rank(), dist.get_world_size()
    files, kind = Manifest.open(images), kinds[rank]
    source = kind if ":" in kind else Pictures(files, int(kind))
    config = resolve("quickstart", {"data": {"train": source, "val": None}})
    try:
        train, _, said = read_manifests(config.data, World(rank, size, rank, size, torch.device("cpu"), "gloo"))
    except DataError as error:
        return str(error)
    return f"{len(train)} images, {train.read(7) == files.read(7 + int(kind) if kind.isdigit() else 7)}, {said}"


def test_ranks_read_a_table_or_a_dataset_of_their_own(workers, images, table):
    assert workers(2).run(read, str(images), [f"hf:{table}"] * 2) == ["96 images, True, []"] * 2
    assert workers(2).run(read, str(images), ["0", "0"]) == ["96 images, True, []"] * 2
    for said in workers(2).run(read, str(images), ["0", "1"]):
        assert "ranks 0 and 1 see different images (96 and 95); give all machines the same files" in said
