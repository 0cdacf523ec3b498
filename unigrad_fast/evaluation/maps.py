"""`unigrad-fast evaluate map`: the features of images as points in a plane, coloured by class."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from unigrad_fast.evaluation import charts
from unigrad_fast.evaluation.classes import LABEL
from unigrad_fast.evaluation.feature_files import UNLABELLED, finding, kind_of
from unigrad_fast.evaluation.knn import over_ranks
from unigrad_fast.evaluation.passes import read_features
from unigrad_fast.evaluation.results import folder_beside, write_result
from unigrad_fast.evaluation.rows import Features, restored
from unigrad_fast.evaluation.runs import NOTHING_KEPT, Asked, opened_on
from unigrad_fast.runtime.errors import UserError
from unigrad_fast.runtime.outputs import Written
from unigrad_fast.runtime.process_group import World, gather, on_first
from unigrad_fast.runtime.quiet import without_warnings
from unigrad_fast.runtime.wording import brief

NEIGHBOURS, LEAST_DISTANCE = 15, 0.1  # umap-learn's defaults
NOT_REPEATED = "umap-learn with the same seed gives another picture on another machine or in another version"


def evaluate_map(run: Path | None, images: Path | None, method: Literal["pca", "umap"], asked: Asked) -> Written:
    """Draw images as points by their features to map-METHOD-epochE.png in RUN/evaluation.

    Features are ℓ2-normalised, as for kNN.

    Args:
        run: the run folder; None with `asked.weights`.
        images: labelled images; None takes the validation images of the run.
        method: "pca", or "umap" with umap-learn.
        asked: the encoder, whether its features are kept, and the folder of the results.

    Raises:
        UserError: there are no weights or images, or the images have no labels or a single class.
        RunStopped: a feature is not finite, or too many images cannot be used.
    """
    find = finding(images, "val", "--images")
    with opened_on(run, asked, find) as this, this.preemption.nothing_to_save(NOTHING_KEPT):
        path = images or this.config.data.val
        folder = folder_beside(run, asked.output, {"images": path})
        labels = np.asarray(this.train.labels)
        if labels[0] == UNLABELLED:
            raise UserError(f"images = {path}: have no labels to colour by; {LABEL}")
        if len(np.unique(labels)) < 2:
            raise UserError(
                f"images = {path}: all belong to one class, {this.train.classes[labels[0]]}; give images of several, "
                "or check whether the class folders are one level lower"
            )
        keeper = this.keeper(folder, asked)
        found = read_features(this, this.train, kind_of(this.config, path), keeper)
        this.leave_out("given", found.left_out)
        settings: dict[str, Any] = {"protocol": f"map, {method}"}
        if method == "pca":
            own, shares = principal(found, this.world)
            figures: dict[str, Any] = {"shares_of_variance": shares}
            axes = [f"principal component {number + 1} ({100 * share:.1f} %)" for number, share in enumerate(shares)]
        else:
            settings |= {"neighbours": NEIGHBOURS, "least_distance": LEAST_DISTANCE}
            figures, axes = {"remark": NOT_REPEATED}, ["UMAP 1", "UMAP 2"]
            own = found.own(this.world)
        everywhere = gather((found.usable(this.world.rank, this.world.size), own.numpy()))
        positions, points = (np.concatenate(part) for part in zip(*everywhere, strict=True))
        in_order = positions.argsort()
        positions, points = positions[in_order], points[in_order]
        if method == "umap":
            points = on_first(lambda: neighbourhoods(points, this.config.seed))
        title = [
            f"{method.upper()} of features, {this.settings['branch']}, {this.name}",
            f"{len(points):,} images in {brief(path)}",
        ]
        if method == "umap":
            title.append(NOT_REPEATED)
        named, others = charts.coloured(labels[positions])
        written = on_first(
            lambda: write_result(
                folder,
                this.stem(f"map-{method}"),
                {**this.settings_of_images(), **settings},
                {"data": str(path), "counts": {"used": len(points), "left_out": found.left_out.count}, **figures},
                picture=charts.draw_map(points, labels[positions], this.train.classes, title, axes),
            )
        )
        this.say(written.line)
        if len(others):
            this.say(f"{len(named)} classes with most images have a colour; the {len(others):,} others are gray")
        if method == "umap":
            this.say(NOT_REPEATED)
        this.tell(keeper)
        return written


def principal(found: Features, world: World) -> tuple[Tensor, list[float]]:
    """This rank's ℓ2-normalised features on the two axes of largest variance, float64 [n, 2]; and their shares of it.

    All ranks call this together. Of an axis, the element with the largest magnitude is positive.
    """
    width = found.width
    total, square = torch.zeros(width, dtype=torch.float64), torch.zeros(width, width, dtype=torch.float64)
    positions = found.usable(world.rank, world.size)
    for _, rows in found.blocks(positions):
        unit = normalize(restored(rows).double(), dim=1)
        total += unit.sum(dim=0)
        square += unit.T @ unit
    over_ranks(total, world)
    over_ranks(square, world)
    images = len(found.usable())
    mean = total / images
    variance, axes = torch.linalg.eigh(square / images - mean.outer(mean))
    axes = axes[:, [-1, -2]]
    axes *= axes.gather(0, axes.abs().argmax(dim=0, keepdim=True)).sign()
    parts = [(normalize(restored(rows).double(), dim=1) - mean) @ axes for _, rows in found.blocks(positions)]
    shares = variance[[-1, -2]].clamp(min=0) / variance.clamp(min=0).sum().clamp(min=1e-300)
    return torch.cat(parts) if parts else torch.empty(0, 2, dtype=torch.float64), shares.tolist()


def neighbourhoods(features: np.ndarray, seed: int) -> np.ndarray:
    """UMAP's points, fp32 [N, 2], of features [N, D]. Raises UserError if there are too few."""
    if len(features) <= NEIGHBOURS:
        raise UserError(f"method = umap: needs more than {NEIGHBOURS} images, but there are {len(features)}; take pca")
    with without_warnings():
        from umap import UMAP

        made = UMAP(n_neighbors=NEIGHBOURS, min_dist=LEAST_DISTANCE, metric="cosine", random_state=seed)
        return made.fit_transform(features)
