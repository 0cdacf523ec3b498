"""`unigrad-fast evaluate confusion`: which classes a classifier on the features takes for which.

Classes are ordered so that those that are taken for each other stand together. Shapes: K classes.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from rich.table import Table
from torch import Tensor, nn

from unigrad_fast.checkpoints.export import describe_probe, probe_tensors
from unigrad_fast.evaluation import charts
from unigrad_fast.evaluation.classes import without_unused
from unigrad_fast.evaluation.knn import PROTOCOL, count_hits, neighbours, over_ranks, predicted, require_k, settled_k
from unigrad_fast.evaluation.knn_probe import FINDS_ITSELF
from unigrad_fast.evaluation.linear import WAS_FITTED
from unigrad_fast.evaluation.passes import Keeper, read_features
from unigrad_fast.evaluation.results import folder_beside, write_result
from unigrad_fast.evaluation.runs import NOTHING_KEPT, Asked, Opened, opened
from unigrad_fast.evaluation.shares import share_of
from unigrad_fast.runtime.console import fitted
from unigrad_fast.runtime.errors import UserError
from unigrad_fast.runtime.fallback import harmless
from unigrad_fast.runtime.outputs import Written
from unigrad_fast.runtime.process_group import on_first

MOST_CLASSES = 2000  # the order takes time that grows with the third power
PAIRS = 10  # that are named


def evaluate_confusion(run: Path | None, of: Literal["knn", "linear"], asked: Asked) -> Written:
    """Draw the confusion matrix of the validation images to confusion-OF-epochE.png in RUN/evaluation.

    The .json beside it has the matrix, and the most confused pairs of classes are printed.

    Args:
        run: the run folder; None with `asked.weights`.
        of: kNN, or the newest linear classifier of these weights in the folder of the results.
        asked: checkpoint or weights, images and settings of kNN.

    Raises:
        UserError: there are no weights, labels, validation images or no such classifier, or too many classes.
        RunStopped: a feature is not finite, or too many images cannot be used.
    """
    whose, same = ("kNN", FINDS_ITSELF) if of == "knn" else ("a linear classifier", WAS_FITTED)
    with opened(run, asked, whose, same) as this, this.preemption.nothing_to_save(NOTHING_KEPT):
        paths = {"data.train": this.config.data.train, "data.val": this.config.data.val}
        folder = folder_beside(run, asked.output, paths)
        train, val, _ = without_unused(this.train, this.val)
        this = replace(this, train=train, val=val)
        if len(train.classes) > MOST_CLASSES:
            raise UserError(
                f"data.train = {this.config.data.train}: {len(train.classes):,} classes; a confusion matrix shows at "
                f"most {MOST_CLASSES:,}, so give images of fewer with --data.train and --data.val"
            )
        keeper = this.keeper(folder, asked)
        judge = of_knn if of == "knn" else of_linear
        matrix, near, classifier, settings = judge(this, keeper, folder, asked)
        over_ranks(matrix, this.world)
        over_ranks(near, this.world)
        counts = matrix.numpy()
        images, right = int(counts.sum()), int(np.trace(counts))
        top1, top5 = 100 * right / images, 100 * int(near) / images if len(counts) >= 5 else None
        place = order(counts)
        names = [train.classes[number] for number in place]
        counts = counts[np.ix_(place, place)]
        pairs = most_confused(counts)
        title = (
            f"confusion of {classifier}",
            f"{this.settings['branch']}, {this.name}: {images:,} images, top-1 {top1:.2f} %"
            + ("" if top5 is None else f", top-5 {top5:.2f} %"),
        )
        this.console.print(_table(", ".join(title), names, counts, pairs))
        figures: dict[str, Any] = {
            "accuracy": top1,
            "top5": top5,
            "classes": names,
            "matrix": counts.tolist(),
            "most_confused": [_figures(names, counts, *pair) for pair in pairs],
        }
        written = on_first(
            lambda: write_result(
                folder,
                this.stem(f"confusion-{of}"),
                {**this.settings, **settings},
                {**this.paths, "counts": this.counts(), **figures},
                picture=charts.draw_confusion(counts, names, title),
            )
        )
        this.say(written.line)
        this.tell(keeper)
        return written


def of_knn(
    this: Opened, keeper: Keeper | None, folder: Path, asked: Asked
) -> tuple[Tensor, Tensor, str, dict[str, Any]]:
    """This rank's part of the confusion matrix of kNN, int64 [K, K], true by predicted class, and of its top-5 hits,
    int64 []; its name and settings.

    Args:
        this: has the images under the numbers of the classes that occur.
        folder: of the results.
    """
    if isinstance(asked.k, int):
        require_k(asked.k, len(this.train))
    shares = []
    for kind, images in this.images().items():
        found = read_features(this, images, kind, keeper)
        this.leave_out(kind, found.left_out)
        shares.append(share_of(found, images.labels, this.world))
    bank, queries = shares
    there = len(this.train) - bank.left_out.count
    knn = this.config.evaluation.knn
    k = settled_k(knn.k if knn.k == "auto" else min(knn.k, there), there)
    matrix, near = _none_counted(len(this.train.classes))
    for similarity, label, truth in neighbours(bank, queries, this.world, k):
        if len(truth):
            matrix += counted(truth, predicted(similarity, label, knn.temperature), len(matrix))
            near += count_hits(similarity, label, truth, len(matrix), knn.temperature)[1]
    settings = {"protocol": f"confusion of {PROTOCOL}", "k": k, "temperature": knn.temperature}
    return matrix, near, f"{PROTOCOL}, k {k}, T {knn.temperature:g}", settings


def of_linear(
    this: Opened, keeper: Keeper | None, folder: Path, asked: Asked
) -> tuple[Tensor, Tensor, str, dict[str, Any]]:
    """As `of_knn`, of a linear classifier that was trained before."""
    file, protocol = on_first(lambda: _newest(folder, this))
    classifier = {key: tensor.to(this.world.device) for key, tensor in probe_tensors(file).items()}
    found = read_features(this, this.val, "validation", keeper)
    this.leave_out("validation", found.left_out)
    labels = torch.as_tensor(this.val.labels, dtype=torch.int64)
    matrix, near = _none_counted(len(this.train.classes))
    for features, index in found.batches(this.world):
        best = nn.functional.linear(features, **classifier).topk(min(5, len(matrix)), dim=1).indices.cpu()
        matrix += counted(labels[index], best[:, 0], len(matrix))
        near += (best == labels[index, None]).any(dim=1).sum()
    name = f"a linear classifier, {protocol} protocol"
    return matrix, near, name, {"protocol": f"confusion of {name}", "classifier": file.name}


def _none_counted(classes: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(classes, classes, dtype=torch.int64), torch.zeros((), dtype=torch.int64)


def counted(truth: Tensor, guess: Tensor, classes: int) -> Tensor:
    """Numbers of images, int64 [K, K], by true class (rows) and predicted class (columns)."""
    return torch.bincount(truth * classes + guess, minlength=classes**2).view(classes, classes)


def order(counts: np.ndarray) -> np.ndarray:
    """An order of the classes, int64 [K], in which those that are taken for each other stand together.

    Hierarchical clustering with average linkage, by the share of each class's images that are taken for the other.
    Groups are joined at the ends that are most alike.

    Args:
        counts: numbers of images [K, K], true by predicted.
    """
    share = _shares(counts)
    alike = share + share.T
    between = alike.copy()  # of groups; a group has the number of its first class
    np.fill_diagonal(between, -1)
    groups = {number: [number] for number in range(len(counts))}
    while len(groups) > 1:
        one, other = sorted(np.unravel_index(between.argmax(), between.shape))
        first, second = groups[one], groups.pop(other)
        ends = [(alike[a[-1], b[0]], a, b) for a in (first, first[::-1]) for b in (second, second[::-1])]
        sizes = len(first), len(second)
        _, first, second = max(ends, key=lambda end: end[0])
        groups[one] = first + second
        joined = np.average(between[[one, other]], axis=0, weights=sizes)
        joined[[one, other]] = -1
        joined[between[one] < 0] = -1  # of groups that were joined before
        between[one], between[:, one] = joined, joined
        between[other], between[:, other] = -1, -1
    return np.array(next(iter(groups.values())), np.int64)


def _shares(counts: np.ndarray) -> np.ndarray:
    """Shares [K, K] of each class's images by predicted class; 0 of a class without images."""
    return counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)


def most_confused(counts: np.ndarray) -> list[tuple[int, int]]:
    """The pairs (true, predicted) of different classes with the largest shares of a class's images; none without."""
    share = _shares(counts)
    np.fill_diagonal(share, 0)
    largest = np.argsort(-share, axis=None, kind="stable")[:PAIRS].tolist()
    pairs = (divmod(place, len(counts)) for place in largest)
    return [pair for pair in pairs if share[pair]]


def _newest(folder: Path, this: Opened) -> tuple[Path, str]:
    """The newest linear classifier of these weights and classes, and its protocol; UserError if there is none."""
    wanted = {key: this.settings[key] for key in ("weights", "branch", "transform", "labels")}
    wanted = json.loads(json.dumps({**wanted, "classes": this.train.classes}))  # as they will be read
    for path in sorted(folder.glob("linear-*.safetensors"), key=lambda path: path.stat().st_mtime_ns, reverse=True):
        try:
            about = describe_probe(path)
        except ValueError:
            continue
        stages = about.get("chosen", {}).get("stages", 1)
        if stages == 1 and all(about.get(key) == value for key, value in wanted.items()):
            return path, about["protocol"]
    raise UserError(
        f"of = linear: {folder} holds no linear classifier of these weights and classes; run `unigrad-fast evaluate "
        "linear` with the same options first"
    )


def _figures(names: list[str], counts: np.ndarray, row: int, column: int) -> dict[str, Any]:
    images, of = int(counts[row, column]), int(counts[row].sum())
    return {"class": names[row], "taken_for": names[column], "images": images, "of": of}


def _table(title: str, names: list[str], counts: np.ndarray, pairs: list[tuple[int, int]]) -> Table:
    table = Table(title=fitted(harmless(f"{title}; most confused")), title_justify="left")
    for column in ("class", "taken for", "images", "share, %"):
        table.add_column(column, justify="left" if column in ("class", "taken for") else "right", overflow="fold")
    for row, column in pairs:
        images, of = int(counts[row, column]), int(counts[row].sum())
        texts = (names[row], names[column], f"{images:,} of {of:,}", f"{100 * images / of:.1f}")
        table.add_row(*(fitted(harmless(text)) for text in texts))
    return table
