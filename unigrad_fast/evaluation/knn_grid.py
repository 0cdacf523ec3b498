"""`unigrad-fast evaluate knn --grid true`: kNN for several k and temperatures, from one search.

The values are those of DINO and DINOv2 (k 10, 20, 100, 200; T 0.07) and of lightly (k 200; T 0.1), and T 0.05. Two of
them differ by many points for one encoder, so the result has all, which one was chosen, and on which images.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from unigrad_fast.evaluation.knn import KNNResult, sharded_knn_grid
from unigrad_fast.evaluation.knn_probe import FINDS_ITSELF
from unigrad_fast.evaluation.passes import read_features
from unigrad_fast.evaluation.results import folder_of, printed, write_result
from unigrad_fast.evaluation.runs import NOTHING_KEPT, Asked, Opened, opened
from unigrad_fast.evaluation.samples import held_out
from unigrad_fast.evaluation.shares import Share, share_of
from unigrad_fast.runtime.errors import UserError
from unigrad_fast.runtime.outputs import Written
from unigrad_fast.runtime.process_group import on_first
from unigrad_fast.runtime.wording import count, percent

PROTOCOL = "weighted kNN, grid"
NEIGHBOURS, TEMPERATURES = (10, 20, 100, 200), (0.05, 0.07, 0.1)


def evaluate_knn_grid(run: Path | None, choose: str, asked: Asked) -> Written:
    """Print the kNN accuracy of a backbone for each k and T, and write all to knn-grid-epochE.json in RUN/evaluation.

    Args:
        run: the run folder; None with `asked.weights`.
        choose: images on which a k and T are chosen: "val", or "train" for a held-out tenth of the training images.
        asked: checkpoint or weights, and images.

    Raises:
        UserError: there are no weights, labels or validation images, or fewer training images than the smallest k.
        RunStopped: a feature is not finite, or too many images cannot be used.
    """
    folder = folder_of(run, asked.output)
    with opened(run, asked, "kNN", FINDS_ITSELF) as this, this.preemption.nothing_to_save(NOTHING_KEPT):
        keeper = this.keeper(folder, asked)
        found = {kind: read_features(this, images, kind, keeper) for kind, images in this.images().items()}
        for kind, features in found.items():
            this.leave_out(kind, features.left_out)
        bank, queries = (share_of(found[kind], images.labels, this.world) for kind, images in this.images().items())
        train = found["training"]
        if len(train.usable()) < min(NEIGHBOURS):
            raise UserError(
                f"the grid needs at least {min(NEIGHBOURS)} training images, and there are {len(train.usable())} that "
                "can be used; use --k without --grid"
            )
        held = torch.zeros(len(this.train), dtype=torch.bool)
        if choose == "train":
            held = torch.from_numpy(held_out(this.train.labels, this.config.seed))
        usable = int((~held[train.usable()]).sum())
        neighbours = [k for k in NEIGHBOURS if k <= usable]
        if larger := [str(k) for k in NEIGHBOURS if k > usable]:
            this.say(f"k {', '.join(larger)} left out: there are only {count(usable, 'training image')} to vote")
        cells = list(product(neighbours, TEMPERATURES))
        results = sharded_knn_grid(bank, queries, this.world, cells)
        chosen_by, images = results, "validation images, which it is judged on, too"
        if choose == "train":
            own = held[train.usable(this.world.rank, this.world.size)]
            chosen_by, images = chosen(this, bank, own, cells), "held-out training images"
        best = max(range(len(cells)), key=lambda number: chosen_by[number].accuracy)
        result = results[best]
        title = (
            f"{PROTOCOL}, {this.settings['branch']}, {this.name}: {result.queries:,} validation images against "
            f"{result.bank:,} training images"
        )
        this.console.print(_table(title, results))
        chosen_on = f"{chosen_by[best].queries:,} {images}"
        this.say(f"chosen on {chosen_on}: k {result.k}, T {result.temperature:g}, {result.accuracy:.2f} %")
        settings = {"k": neighbours, "temperature": TEMPERATURES, "choose": choose}
        figures: dict[str, Any] = {
            "chosen": {"k": result.k, "temperature": result.temperature},
            "chosen_on": chosen_on,
            "grid": [_figures(each) for each in results],
            "accuracy": result.accuracy,
            "top5": result.top5,
        }
        if choose == "train":
            figures["grid_of_choice"] = [_figures(each) for each in chosen_by]
        with printed():
            written = on_first(
                lambda: write_result(
                    folder,
                    this.stem("knn-grid"),
                    {"protocol": PROTOCOL, **this.settings, **settings, "queries": result.queries, "bank": result.bank},
                    {**this.paths, "counts": this.counts(), **figures},
                )
            )
        this.say(written.line)
        this.tell(keeper)
        return written


def chosen(this: Opened, bank: Share, held: Tensor, cells: list[tuple[int, float]]) -> list[KNNResult]:
    """The results of the held-out training images against the others.

    Args:
        held: which of this rank's share are held out, bool [n].
    """
    parts = (Share(bank.rows[rows.to(bank.rows.device)], bank.labels[rows], bank.left_out) for rows in (~held, held))
    return sharded_knn_grid(*parts, this.world, cells)


def _figures(result: KNNResult) -> dict[str, Any]:
    return {key: getattr(result, key) for key in ("k", "temperature", "accuracy", "top5")}


def _table(title: str, results: list[KNNResult]) -> Table:
    table = Table(title=title, title_justify="left")
    for column in ("k", "T", "top-1 accuracy, %", "top-5 accuracy, %"):
        table.add_column(column, justify="right")
    for each in results:
        table.add_row(str(each.k), f"{each.temperature:g}", percent(each.accuracy), percent(each.top5))
    return table
