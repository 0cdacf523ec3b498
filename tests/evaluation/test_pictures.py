"""`evaluate retrieve`, `confusion` and `map`: what the pictures show, from features that are kept."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import shutil
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import torch
from bad_files import BAD
from command_process import command, command_on_two_ranks
from drawn_images import draw_tree
from hypothesis import strategies as st
from PIL import Image
from sklearn.decomposition import PCA
from sklearn.metrics import confusion_matrix
from sklearn.neighbors import NearestNeighbors
from test_knn import ALONE, NONE, clusters, votes_of_scikit_learn
from test_runs import images, made, passes, result, run, said  # noqa: F401

from unigrad_fast.evaluation import charts
from unigrad_fast.evaluation.confusion import counted, most_confused, order
from unigrad_fast.evaluation.features import LeftOut
from unigrad_fast.evaluation.knn import neighbours, predicted, sharded_knn
from unigrad_fast.evaluation.maps import principal
from unigrad_fast.evaluation.retrieval import place_of
from unigrad_fast.evaluation.rows import Features, halved, restored
from unigrad_fast.evaluation.shares import Share, norms, rounded
from unigrad_fast.pipelines import Manifest

EPS = float(np.finfo(np.float64).eps)


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
        ((run, good, gone), f"images = {gone}: no such file; check the path"),
        ((run, folder), f"images = {folder}: is a folder; give a file in it"),
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


@pytest.mark.parametrize("k", [1, 5, 20])
def test_predictions_of_knn_are_those_of_scikit_learn_and_count_its_accuracy(k):
    train, train_labels, val, truth = clusters(seed=k)
    bank, queries = Share(rounded(train), train_labels, NONE), Share(rounded(val), truth, NONE)
    ((similarity, label, own),) = neighbours(bank, queries, ALONE, k)
    matrix = counted(own, predicted(similarity, label, 0.1), 6)
    guess = votes_of_scikit_learn(bank, queries, k, 0.1).argmax(axis=1)
    assert np.array_equal(matrix.numpy(), confusion_matrix(truth, guess, labels=range(6)))
    accuracy = sharded_knn(bank, queries, ALONE, k, 0.1).accuracy
    assert 100 * matrix.trace().item() / 40 == accuracy < 100


def test_confusion_of_both_classifiers_counts_the_accuracy_that_they_have(run, images, capsys, passes):  # noqa: F811
    said(capsys, "evaluate", "knn", run)
    passes.clear()
    printed = said(capsys, "evaluate", "confusion", run)
    assert passes == [] and "features of 33 images were read from" in printed and "taken for" in printed
    found = result(run, "confusion-knn-epoch2")
    matrix = np.array(found["matrix"])
    assert sorted(found["classes"]) == ["class0", "class1", "class2"] and matrix.sum(axis=1).tolist() == [3, 3, 3]
    assert found["accuracy"] == pytest.approx(100 * matrix.trace() / 9)
    assert found["accuracy"] == pytest.approx(result(run, "knn-epoch2")["accuracy"]["trained encoder"])
    assert found["counts"]["validation"] == {"used": 9, "left_out": 0} and found["k"] == 3
    wrong = [(pair["class"], pair["taken_for"], pair["images"]) for pair in found["most_confused"]]
    names = found["classes"]
    assert sorted(wrong) == sorted((names[a], names[b], matrix[a, b]) for a, b in np.argwhere(matrix) if a != b)
    assert min(size(run / "evaluation/confusion-knn-epoch2.png")) > 400
    said(capsys, "evaluate", "confusion", run, "--k", 5)
    assert result(run, "confusion-knn-epoch2-2")["k"] == 5
    refused = said(capsys, "evaluate", "confusion", run, "--k", 25, status=2)
    assert refused == "error: k = 25: exceeds the 24 training images; give at most 24, or auto\n"
    assert "k = 5: applies only to --of knn" in said(
        capsys, "evaluate", "confusion", run, "--of", "linear", "--k", 5, status=2
    )

    refused = said(capsys, "evaluate", "confusion", run, "--of", "linear", status=2)
    assert refused == (
        f"error: of = linear: {run}/evaluation holds no linear classifier of these weights and classes; run "
        "`unigrad-fast evaluate linear` with the same options first\n"
    )
    said(capsys, "evaluate", "linear", run)
    passes.clear()
    said(capsys, "evaluate", "confusion", run, "--of", "linear")
    found, linear = result(run, "confusion-linear-epoch2"), result(run, "linear-quick-epoch2")
    assert passes == [] and found["accuracy"] == pytest.approx(linear["accuracy"])
    assert found["top5"] is None  # of three classes
    assert found["classifier"] == "linear-quick-epoch2.safetensors"
    for given in (("--checkpoint", 10), ("--data.train", images / "lacking")):  # other weights, other classes
        assert "no linear classifier of these" in said(
            capsys, "evaluate", "confusion", run, "--of", "linear", *given, status=2
        )
    table = said(capsys, "evaluate", "list", run)
    assert "confusion of" in table


@hypothesis.given(st.integers(0, 10_000), st.lists(st.integers(1, 6), min_size=1, max_size=6))
def test_classes_that_are_taken_only_for_each_other_stand_together(seed, sizes):
    rng = np.random.default_rng(seed)
    block = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    counts = np.where(block[:, None] == block, rng.integers(1, 20, (len(block), len(block))), 0)
    place = order(counts)
    assert sorted(place) == list(range(len(block)))
    assert np.count_nonzero(np.diff(block[place])) == len(sizes) - 1


def test_the_most_confused_pairs_are_those_with_the_largest_shares_and_classes_without_images_have_none():
    counts = np.array([[5, 5, 0], [1, 98, 1], [0, 0, 0]])
    assert most_confused(counts) == [(0, 1), (1, 0), (1, 2)]
    assert most_confused(np.diag([3, 4])) == []
    assert sorted(order(counts)) == [0, 1, 2] and order(np.array([[7]])).tolist() == [0]


def test_the_map_shows_scikit_learns_principal_components_with_signs_that_are_fixed():
    rng = np.random.default_rng(0)
    features = rng.normal(size=(200, 12)) * np.array([9, 5] + [1] * 10) + 3
    rows = halved(torch.from_numpy(features).float())
    found = Features(200, 1, {0: rows.numpy()}, np.zeros(0, np.int64), LeftOut(0, 200, None))
    points, shares = principal(found, ALONE)
    unit = restored(rows).double().numpy()
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    theirs = PCA(2, svd_solver="full")
    expected = theirs.fit_transform(unit)
    largest = np.abs(theirs.components_).argmax(axis=1)
    expected *= np.sign(theirs.components_[[0, 1], largest])
    # The covariance has an error of about 200 · EPS; a gap g turns it into one of 200 · EPS / g of an axis.
    variance = np.sort(np.linalg.eigvalsh(np.cov(unit.T)))[::-1]
    gap = min(variance[0] - variance[1], variance[1] - variance[2])
    assert np.abs(points.numpy() - expected).max() < 200 * EPS / gap
    assert shares == pytest.approx(theirs.explained_variance_ratio_.tolist(), abs=200 * EPS / variance.sum())
    assert torch.equal(points, principal(found, ALONE)[0])


def test_a_map_is_drawn_from_kept_features_and_is_always_the_same(
    run,  # noqa: F811
    images,  # noqa: F811
    tmp_path,
    capsys,
    monkeypatch,
    passes,  # noqa: F811
):
    said(capsys, "evaluate", "knn", run)
    passes.clear()
    titles: list[list[str]] = []
    draw = charts.draw_map
    monkeypatch.setattr(charts, "draw_map", lambda *given: titles.append(given[3]) or draw(*given))
    said(capsys, "evaluate", "map", run)
    assert titles == [["PCA of features, online backbone, epoch 2", f"9 images in {images.name}/val"]]
    first = (run / "evaluation/map-pca-epoch2.png").read_bytes()
    said(capsys, "evaluate", "map", run)
    assert passes == [] and (run / "evaluation/map-pca-epoch2.png").read_bytes() == first
    found = result(run, "map-pca-epoch2")
    assert found["counts"] == {"used": 9, "left_out": 0} and sum(found["shares_of_variance"]) <= 1 + 4 * EPS

    shutil.copytree(images / "val", tmp_path / "one", ignore=shutil.ignore_patterns("class1", "class2"))
    for given, message in (
        (images / "val/class0", f"images = {images}/val/class0: have no labels to colour by; label them"),
        (tmp_path / "one", f"images = {tmp_path}/one: all belong to one class, class0; give images of several"),
        (tmp_path / "gone", f"{tmp_path}/gone does not exist; "),
    ):
        (line,) = said(capsys, "evaluate", "map", run, given, status=2).splitlines()
        assert line.startswith(f"error: {message}")
    assert passes == []


def test_of_many_classes_a_map_names_those_with_most_images(run, tmp_path, capsys):  # noqa: F811
    draw_tree(tmp_path / "many", per_class=1, classes=22, size=20)
    shutil.copy(tmp_path / "many/class21/000.jpg", tmp_path / "many/class21/001.jpg")
    printed = said(capsys, "evaluate", "map", run, tmp_path / "many")
    assert "20 classes with most images have a colour; the 2 others are gray\n" in printed
    named, others = charts.coloured(np.array([*range(22), 21]))
    assert 21 in named and others.tolist() == [19, 20]


def test_umap_is_an_extra_and_says_that_its_seed_does_not_repeat(run, images, capsys, monkeypatch):  # noqa: F811
    if importlib.util.find_spec("umap"):
        printed = said(capsys, "evaluate", "map", run, images / "train", "--method", "umap")
        assert "with the same seed gives another picture on another machine" in printed
        assert "another machine" in result(run, "map-umap-epoch2")["remark"]
        assert "needs more than 15 images" in said(capsys, "evaluate", "map", run, "--method", "umap", status=2)
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "umap" else find(name))
    refused = said(capsys, "evaluate", "map", run, "--method", "umap", status=2)
    assert refused == (
        "error: method = umap: needs umap-learn, which is not installed; type `pip install 'unigrad-fast[umap]'`, or "
        "take --method pca\n"
    )


@pytest.mark.parametrize("classes", [1, 3, 25, 70])
def test_any_number_of_classes_and_any_names_are_drawn(classes):
    names = ["$x_1", "a\nb", os.fsdecode(b"\xff"), "x" * 200, "日本", *map(str, range(70))][:classes]
    counts = np.diag(np.arange(classes)) + np.eye(classes, k=1, dtype=int)
    with Image.open(io.BytesIO(charts.draw_confusion(counts, names, ["$a", "b " * 200]))) as picture:
        assert min(picture.size) > 400
    points = np.random.default_rng(0).normal(size=(2 * classes, 2))
    labels = np.arange(2 * classes) % classes
    with Image.open(io.BytesIO(charts.draw_map(points, labels, names, ["c"], ["$x", "y"]))) as picture:
        assert min(picture.size) > 400


def test_two_ranks_draw_what_one_draws(made, images, tmp_path):  # noqa: F811
    found, asked = [], [images / "train/class1/003.jpg", images / "val/class2/001.jpg", images / "train/class2/004.jpg"]
    for ranks in (command, command_on_two_ranks):
        folder = tmp_path / ranks.__name__
        shutil.copytree(made, folder)
        for words in (
            ("retrieve", folder, *asked, "--keep_features", "false"),
            ("confusion", folder, "--keep_features", "false"),
            ("map", folder, images / "train"),
        ):
            done = ranks("evaluate", *words, is_thin=True)
            assert done.returncode == 0, done.stderr
        found.append({path.name: json.loads(path.read_text()) for path in (folder / "evaluation").glob("*.json")})
    alone, both = found
    assert alone.keys() == both.keys() and len(alone) == 3
    shares = [each.pop("map-pca-epoch2.json")["shares_of_variance"] for each in (alone, both)]
    assert shares[0] == pytest.approx(shares[1], rel=1000 * EPS)
    assert alone == both
