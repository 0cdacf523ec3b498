"""`evaluate retrieve`: what the picture shows, from features that are kept."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from bad_files import BAD
from command_process import command, command_on_two_ranks
from PIL import Image
from sklearn.neighbors import NearestNeighbors
from test_runs import images, made, passes, result, run, said  # noqa: F401

from unigrad_fast.evaluation.retrieval import place_of
from unigrad_fast.evaluation.shares import norms, rounded
from unigrad_fast.pipelines import Manifest


def size(path: Path) -> tuple[int, int]:
    with Image.open(path) as picture:
        picture.load()
        return picture.size


def test_neighbours_are_those_of_scikit_learn_and_a_second_search_makes_no_second_pass(run, images, capsys, passes):  # noqa: F811
    inside, outside = images / "train/class1/003.jpg", images / "val/class2/001.jpg"
    printed = said(capsys, "evaluate", "retrieve", run, inside, outside, "--k", 5)
    assert passes == [24, 1]
    found = result(run, "retrieve-epoch2")
    assert f"written to {run}/evaluation/retrieve-epoch2.json, drawn in retrieve-epoch2.png\n" in printed
    width, height = size(run / "evaluation/retrieve-epoch2.png")

    said(capsys, "evaluate", "features", run)
    said(capsys, "evaluate", "features", run, outside.parent, "--output", run / "export/asked.npz")
    bank, asked = (np.load(run / f"export/{name}.npz") for name in ("features-epoch2", "asked"))
    rows = rounded(torch.from_numpy(np.concatenate([bank["feature"], asked["feature"]]))).double()
    unit = (rows / norms(rows)[:, None]).numpy()
    queries = unit[[11, 24 + 1]]
    distance, index = NearestNeighbors(n_neighbors=6, algorithm="brute").fit(unit[:24]).kneighbors(queries)
    for query, far, near, label in zip(found["results"], distance, index, ("class1", "class2"), strict=True):
        others = near != 11 if label == "class1" else slice(5)
        assert query["label"] == label
        assert [each["file"] for each in query["neighbours"]] == bank["file"][near[others]].tolist()
        assert [each["label"] for each in query["neighbours"]] == [f"class{bank['label'][at]}" for at in near[others]]
        # |a - b|² = 2 - 2 a·b. Products of rows are exact, but for two roundings to fp32: of a norm, and with it.
        expected = (1 - far[others] ** 2 / 2).tolist()
        assert [each["similarity"] for each in query["neighbours"]] == pytest.approx(expected, rel=2**-23)
    passes.clear()
    printed = said(capsys, "evaluate", "retrieve", run, inside, "--k", 24)
    assert passes == [] and f"features of 24 images were read from {run}/evaluation/features\n" in printed
    (only,) = result(run, "retrieve-epoch2-2")["results"]
    assert len(only["neighbours"]) == 23 and only["neighbours"][:5] == found["results"][0]["neighbours"]
    assert size(run / "evaluation/retrieve-epoch2.png") == (width, height)
    assert size(run / "evaluation/retrieve-epoch2-2.png") > (width, height)


def test_an_image_finds_itself_only_where_there_is_no_other(run, images, tmp_path, capsys):  # noqa: F811
    (tmp_path / "one").mkdir()
    shutil.copy(images / "val/class0/000.jpg", tmp_path / "one")
    given = (run, tmp_path / "one/000.jpg", "--among", tmp_path / "one", "--k", 1, "--output", tmp_path / "results")
    said(capsys, "evaluate", "retrieve", *given)
    (query,) = json.loads((tmp_path / "results/retrieve-epoch2.json").read_text())["results"]
    assert query["label"] is None and [each["file"] for each in query["neighbours"]] == ["000.jpg"]
    assert query["neighbours"][0]["similarity"] == pytest.approx(1, rel=2**-23)


def test_a_file_is_found_among_images_by_any_of_its_paths(images, tmp_path):  # noqa: F811
    (tmp_path / "link").symlink_to(images / "train")
    folder = Manifest.from_folder(images / "train")
    (tmp_path / "list.txt").write_text(f"{images}/train/class0/001.jpg\n{images}/train/class0/000.jpg\n")
    listed = Manifest.from_list(tmp_path / "list.txt")
    for manifest, place in ((folder, 0), (Manifest.from_folder(tmp_path / "link"), 0), (listed, 1)):
        assert place_of(manifest, images / "train/class0/000.jpg") == place
        assert place_of(manifest, images / "val/class0/000.jpg") is None
    assert place_of(folder, tmp_path / "link/class2/007.jpg") == 23


def test_what_cannot_be_searched_is_refused_in_one_line(run, images, tmp_path, capsys, passes):  # noqa: F811
    good = images / "val/class0/000.jpg"
    for name in ("truncated", "garbage"):
        BAD[name](tmp_path / f"{name}.jpg")
    gone, folder = tmp_path / "gone.jpg", images / "val"
    for given, message in (
        ((run,), "images: missing; give the files whose neighbours are to be drawn"),
        ((run, good, gone), f"images = {gone}: no such file"),
        ((run, folder), f"images = {folder}: is a folder; give files in it"),
        ((run, good, tmp_path / "truncated.jpg"), f"images = {tmp_path}/truncated.jpg: the image cannot be decoded: "),
        ((run, tmp_path / "garbage.jpg"), f"images = {tmp_path}/garbage.jpg: "),
        ((run, good, "--k", 25), f"k = 25: exceeds the 24 images in {images}/train; give fewer"),
        ((run, *[good] * 101), "images: 101 given; one picture shows at most 100, so give fewer"),
        (("--weights", good, "--backbone", "resnet18", good), "weights: come without images; give --among IMAGES"),
        ((run, good, "--among", gone), f"{gone} does not exist; "),
        ((run, good, "--output", images / "train/new"), f"output = {images}/train/new: lies in among = {images}/train"),
    ):
        (line,) = said(capsys, "evaluate", "retrieve", *given, status=2).splitlines()
        assert line.startswith(f"error: {message}")
    assert passes == []


def test_weights_from_elsewhere_are_searched_alike(run, images, tmp_path, capsys, monkeypatch):  # noqa: F811
    monkeypatch.setattr("unigrad_fast.runtime.precision.has_fast_bf16", lambda device: False)  # the run is in fp32
    asked, searched = images / "val/class1/000.jpg", images / "train"
    said(capsys, "evaluate", "retrieve", run, asked)
    said(capsys, "export", run, "--output", tmp_path / "weights.safetensors")
    given = ("--weights", tmp_path / "weights.safetensors", "--backbone", "resnet18", "--among", searched)
    said(capsys, "evaluate", "retrieve", *given, asked)
    found = json.loads((tmp_path / "weights.safetensors-evaluation/retrieve-epoch2.json").read_text())
    assert found["results"] == result(run, "retrieve-epoch2")["results"]


def test_two_ranks_draw_what_one_draws(made, images, tmp_path):  # noqa: F811
    found = []
    for ranks in (command, command_on_two_ranks):
        folder = tmp_path / ranks.__name__
        shutil.copytree(made, folder)
        for words in (("retrieve", folder, images / "train/class1/003.jpg", images / "val/class2/001.jpg"),):
            done = ranks("evaluate", *words, is_thin=True)
            assert done.returncode == 0, done.stderr
        found.append({path.name: json.loads(path.read_text()) for path in (folder / "evaluation").glob("*.json")})
    alone, both = found
    assert alone.keys() == both.keys() and len(alone) == 1
    assert alone == both
