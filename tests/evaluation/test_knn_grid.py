"""kNN for several k and temperatures from one search, and which of them is chosen on which images."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from drawn_images import draw_tree
from safetensors.numpy import load_file
from sklearn.metrics import confusion_matrix
from test_knn import ALONE, NONE, clusters, judged_by_others, votes_of_scikit_learn
from test_runs import images, made, run, said  # noqa: F401
from test_sharded_knn import world

from unigrad_fast.evaluation.knn import KNNResult, sharded_knn, sharded_knn_grid
from unigrad_fast.evaluation.knn_grid import chosen
from unigrad_fast.evaluation.samples import held_out
from unigrad_fast.evaluation.shares import Share, rounded

CELLS = [(k, temperature) for k in (1, 3, 10, 90) for temperature in (0.05, 0.1)]


def shares(seed: int, rank: int = 0, size: int = 1) -> tuple[Share, Share]:
    """This rank's bank and queries; with an even seed many similarities are equal."""
    train, train_labels, val, val_labels = clusters(seed, bank=90, queries=31)
    if seed % 2 == 0:
        train, val = train.sign(), val.sign()
        train[:, 4:] = val[:, 4:] = 0
    own = slice(rank, None, size)
    return Share(rounded(train)[own], train_labels[own], NONE), Share(rounded(val)[own], val_labels[own], NONE)


def grid_of(seed: int) -> list[KNNResult]:
    return sharded_knn_grid(*shares(seed, world().rank, world().size), world(), CELLS, chunk=16)


@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_each_cell_of_a_grid_is_what_a_search_of_its_own_gives_on_any_number_of_ranks(seed, workers):
    alone = [sharded_knn(*shares(seed), ALONE, k, temperature) for k, temperature in CELLS]
    assert len({result.accuracy for result in alone}) > 2
    for ranks in (1, 2, 3):
        assert workers(ranks).run(grid_of, seed) == [alone] * ranks


def test_each_cell_has_the_accuracies_that_torchmetrics_and_scikit_learn_find():
    bank, queries = shares(1)
    for result in sharded_knn_grid(bank, queries, ALONE, CELLS):
        votes = votes_of_scikit_learn(bank, queries, result.k, result.temperature)
        truth = queries.labels.numpy()
        assert result.accuracy == pytest.approx(100 * (votes.argmax(axis=1) == truth).mean())
        if result.k == 90:  # every class has votes
            assert (result.accuracy, result.top5) == pytest.approx(judged_by_others(votes, truth), abs=1e-4)


def test_a_tenth_of_each_class_is_held_out_and_always_the_same():
    labels = np.repeat([0, 1, 2], [40, 25, 9])
    held = held_out(labels, 3)
    assert np.bincount(labels[held], minlength=3).tolist() == [4, 2, 0]
    assert (held == held_out(labels, 3)).all() and (held != held_out(labels, 4)).any()


def written(folder, name: str = "knn-grid-epoch2") -> dict:
    return json.loads((folder / f"{name}.json").read_text())


def test_the_command_shows_all_cells_and_says_on_what_one_was_chosen(run, tmp_path, capsys):  # noqa: F811
    draw_tree(tmp_path / "train", per_class=40, classes=6)
    draw_tree(tmp_path / "val", per_class=5, classes=6)
    given = (run, "--data.train", tmp_path / "train", "--data.val", tmp_path / "val")
    printed = said(capsys, "evaluate", "knn", *given, "--grid", "true")
    found = written(run / "evaluation")
    assert [(cell["k"], cell["temperature"]) for cell in found["grid"]] == [
        (k, temperature) for k in (10, 20, 100, 200) for temperature in (0.05, 0.07, 0.1)
    ]
    best = max(cell["accuracy"] for cell in found["grid"])
    assert found["accuracy"] == best and found["top5"] is not None
    assert found["chosen"] == {
        key: next(c for c in found["grid"] if c["accuracy"] == best)[key] for key in found["chosen"]
    }
    assert (
        "chosen on 30 validation images, which it is judged on, too: k " in printed and f", {best:.2f} %\n" in printed
    )
    for cell in found["grid"][::5]:
        printed = said(capsys, "evaluate", "knn", *given, "--k", cell["k"], "--temperature", cell["temperature"])
        assert "top-1 accuracy, % ┃ top-5 accuracy, %" in printed
        assert re.search(rf"epoch 2 +│ +{cell['accuracy']:.2f} │ +{cell['top5']:.2f} │", printed)
        one = max((run / "evaluation").glob("knn-epoch2*.json"), key=lambda path: path.stat().st_mtime_ns)
        alone = json.loads(one.read_text())
        assert {key: alone[key]["trained encoder"] for key in ("accuracy", "top5")} == {
            key: cell[key] for key in ("accuracy", "top5")
        }

    printed = said(capsys, "evaluate", "knn", *given, "--grid", "true", "--choose", "train")
    other = written(run / "evaluation", "knn-grid-epoch2-2")
    assert other["grid"] == found["grid"] and other["chosen_on"] == "24 held-out training images"
    choice = max(other["grid_of_choice"], key=lambda cell: cell["accuracy"])
    assert other["chosen"] == {key: choice[key] for key in ("k", "temperature")}
    assert other["accuracy"] in [
        c["accuracy"] for c in found["grid"] if (c["k"], c["temperature"]) == tuple(choice.values())[:2]
    ]
    assert "weighted kNN, grid" in said(capsys, "evaluate", "list", run)


def test_a_confusion_has_the_top1_and_top5_of_its_classifier_and_scikit_learns_matrix(run, tmp_path, capsys):  # noqa: F811
    draw_tree(tmp_path / "train", per_class=4, classes=6)
    draw_tree(tmp_path / "val", per_class=5, classes=6)
    given = (run, "--data.train", tmp_path / "train", "--data.val", tmp_path / "val")
    for kind, classifier in (("knn", "knn"), ("linear", "linear-quick")):
        said(capsys, "evaluate", kind, *given)
        printed = said(capsys, "evaluate", "confusion", *given, "--of", kind)
        judged = written(run / "evaluation", f"{classifier}-epoch2")
        found = written(run / "evaluation", f"confusion-{kind}-epoch2")
        for key, name in (("accuracy", "top-1"), ("top5", "top-5")):
            value = judged[key]["trained encoder"] if kind == "knn" else judged[key]
            assert found[key] == pytest.approx(value) and f"{name} {value:.2f} %" in " ".join(printed.split())
    said(capsys, "evaluate", "features", run, tmp_path / "val", "--output", tmp_path / "val.npz")
    classifier = load_file(run / "evaluation/linear-quick-epoch2.safetensors")
    with np.load(tmp_path / "val.npz") as rows:
        logits, truth = rows["feature"] @ classifier["weight"].T + classifier["bias"], rows["label"]
    names = [[f"class{number}" for number in numbers] for numbers in (truth, logits.argmax(axis=1))]
    assert np.array_equal(found["matrix"], confusion_matrix(*names, labels=found["classes"]))
    assert (found["accuracy"], found["top5"]) == pytest.approx(judged_by_others(logits, truth), abs=1e-4)
    assert found["accuracy"] < 100


def test_neighbours_beyond_the_images_are_left_out_and_said(run, images, capsys):  # noqa: F811
    printed = said(capsys, "evaluate", "knn", run, "--grid", "true")
    assert "k 100, 200 left out: there are only 24 training images to vote\n" in printed
    assert len(written(run / "evaluation")["grid"]) == 6
    few = ("--data.train", images / "val", "--data.val", images / "train")
    refused = said(capsys, "evaluate", "knn", run, "--grid", *few, status=2)
    assert "grid needs at least 10 training images, and there are 9 that can be used; use --k without" in refused
    for options, message in (
        (("--grid", "true", "--k", 5), "k = 5: the grid does not use it; leave it out"),
        (("--choose", "train"), "choose = train: applies only with --grid true; leave it out"),
        (("--grid", "true", "--choose", "train"), "choose = train: no class has ten training images"),
    ):
        assert said(capsys, "evaluate", "knn", run, *options, status=2).startswith(f"error: {message}")


def choice_of(seed: int) -> list[KNNResult]:
    """What the held-out tenth of the bank gives against the rest."""
    rank, size = world().rank, world().size
    held = torch.from_numpy(held_out(shares(seed)[0].labels.numpy(), 0))[rank::size]
    return chosen(SimpleNamespace(world=world()), shares(seed, rank, size)[0], held, CELLS[:-2])


def test_held_out_images_are_judged_against_the_others_alone_on_any_number_of_ranks(workers):
    bank = shares(3)[0]
    held = torch.from_numpy(held_out(bank.labels.numpy(), 0))
    rest, asked = (Share(bank.rows[rows], bank.labels[rows], NONE) for rows in (~held, held))
    expected = [sharded_knn(rest, asked, ALONE, k, temperature) for k, temperature in CELLS[:-2]]
    assert expected[0].queries + expected[0].bank == 90
    for ranks in (1, 2, 3):
        assert workers(ranks).run(choice_of, 3) == [expected] * ranks
