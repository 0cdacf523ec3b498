"""Names that are no UTF-8, as file systems give them: of images, classes, recipe and run, in all that is written."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path

import pytest
from command_process import CommandProcess
from drawn_images import draw_tree

from unigrad_fast import cli
from unigrad_fast.checkpoints.files import Reader, latest
from unigrad_fast.config import resolve
from unigrad_fast.pipelines import Manifest

TERMINAL = {"PYTHONIOENCODING": "ascii:backslashreplace"}
SCHOOL = os.fsdecode(b"\xe9cole")
CLASSES = ["class1", SCHOOL]
RECIPE = """
recipe: cifar_subset
data: {train: FOLDER/train, val: FOLDER/val, batch_size: 16, image_size: 16, threads: 1, max_bad_fraction: 0.1}
model: {projector: {width: 32, depth: 2}}
schedule: {epochs: 1, warmup_epochs: 0}
evaluation: {every: 1, knn: {k: 5}}
engine: {precision: fp32}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Images in train and val, one of them cut off, and a recipe that names them, raw bytes all."""
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("this file system takes UTF-8 names only")
    for part, images in (("train", 16), ("val", 4)):
        draw_tree(folder / part, images)
        (folder / part / "class0").rename(folder / part / SCHOOL)
    whole = folder / "train" / SCHOOL / "003.jpg"
    (whole.parent / os.fsdecode(b"\xff.jpg")).write_bytes(whole.read_bytes()[:-300])
    (folder / "my.yaml").write_bytes(os.fsencode(RECIPE.replace("FOLDER", str(folder))))
    return folder


@pytest.mark.long
def test_a_run_takes_them_and_all_its_files_give_them_back(folder):
    run = folder / os.fsdecode(b"r\xfcn $1_{$")
    for _ in range(2):  # the second one reads what the first has written
        arguments = ("pretrain", "--recipe", folder / "my.yaml", "--output", run)
        result = CommandProcess(*arguments, environment=TERMINAL, is_thin=True).end()
        assert result.returncode == 0, result.stdout + result.stderr
    assert "this run is complete" in result.stdout
    result = CommandProcess("evaluate", "knn", run, environment=TERMINAL, is_thin=True).end()
    assert result.returncode == 0, result.stdout + result.stderr

    config = resolve(run / "config.yaml")
    assert (config.output, config.data.train, config.data.val) == (run, folder / "train", folder / "val")
    assert Reader(latest(run)).about["config"]["data"]["train"] == str(folder / "train")
    assert os.fsencode(run) in (run / "log.txt").read_bytes()
    assert any("tfevents" in path.name for path in (run / "tensorboard").iterdir())
    (bad,) = {json.loads(line)["path"] for line in (run / "bad_images.jsonl").read_text().splitlines()}
    assert Path(bad) == folder / "train" / SCHOOL / os.fsdecode(b"\xff.jpg")


def test_scan_and_shards_take_them_and_give_them_back(folder, tmp_path):
    train, found, shards = (folder / name for name in ("train", os.fsdecode(b"sc\xe9n"), os.fsdecode(b"sh\xe9rd")))
    assert cli.main(["data", "scan", str(train), "--output", str(found), "--threads", "1"]) == 0
    with open(found / "manifest.csv", encoding="utf-8", errors="surrogateescape", newline="") as file:
        assert {row["label"] for row in csv.DictReader(file)} == set(CLASSES)
    assert cli.main(["data", "shard", str(train), str(shards), "--shuffle_seed", "null"]) == 0
    assert os.fsencode(train) in (shards / "left-out.txt").read_bytes()
    for _ in range(2):  # from the index beside the shards, and from the cache
        packed = Manifest.open(shards, tmp_path / "cache")
        assert packed.classes == CLASSES and len(packed) == 32
        assert packed.path(31) == str(shards / "shard-000000.tar" / SCHOOL / "015.jpg")
    (shards / "index.npz").unlink()
    assert Manifest.open(shards, tmp_path / "other").classes == CLASSES  # from the headers of the tar
    (folder / "list.txt").write_bytes(b"".join(b"train/\xe9cole/%03d.jpg\t\xe9cole\n" % number for number in range(4)))
    listed = Manifest.open(folder / "list.txt", tmp_path / "cache")
    assert listed.classes == [SCHOOL] and listed.unreadable().tolist() == []
