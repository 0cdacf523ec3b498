"""`unigrad-fast evaluate`: judge the encoder of a finished or running run."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from rich.table import Table
from safetensors.torch import save
from torch import nn

from unigrad_fast.checkpoints.weights import load_encoder
from unigrad_fast.config import Config, resolve
from unigrad_fast.evaluation import linear
from unigrad_fast.evaluation.baselines import BASELINES
from unigrad_fast.evaluation.knn import BRANCH, PROTOCOL, KNNResult
from unigrad_fast.evaluation.knn_probe import KNNProbe
from unigrad_fast.images.manifests import read_manifests
from unigrad_fast.networks.encoder import build_encoder
from unigrad_fast.pipelines import Manifest
from unigrad_fast.runtime import process_group
from unigrad_fast.runtime.console import new_console
from unigrad_fast.runtime.errors import UserError
from unigrad_fast.runtime.precision import autocast_dtype
from unigrad_fast.runtime.process_group import World
from unigrad_fast.runtime.whole_file import write_whole


def evaluate_knn(run: Path, baselines: bool = False) -> None:
    """Print the kNN accuracy of a run's online backbone and write it to RUN/knn.json.

    Args:
        run: the run folder.
        baselines: judge raw pixels, colour histograms and the untrained encoder beside it.

    Raises:
        UserError: a run without weights, labels or validation images.
        RunStopped: a feature is not finite, or too many images cannot be used.
    """
    config = resolve(run / "config.yaml")
    require_writable(run)
    with process_group.session() as world:
        trained, metadata, train, val = open_run(run, config, world, "kNN")
        untrained = build_encoder(config.model, config.seed, world.device).backbone
        probe = KNNProbe(config, world, train, val)
        dtype = autocast_dtype(config.engine.precision, world.device)
        rows: dict[str, KNNResult] = {}
        if baselines:
            for name, (features, size) in BASELINES.items():
                rows[name] = probe(features, None, image_size=size, crop_fraction=1.0)
            rows["untrained encoder"] = probe(untrained, dtype)
        rows[f"trained encoder, epoch {metadata['epoch']}"] = probe(trained, dtype)
        if world.rank == 0:
            report(run, rows, metadata)


def evaluate_linear(run: Path, protocol: str, changes: dict[str, int | float]) -> None:
    """Print the accuracy of a linear classifier on a run's frozen online backbone.

    It is written to RUN/linear.json, and the classifier to RUN/linear.safetensors.

    Args:
        run: the run folder.
        protocol: "quick" or "paper".
        changes: fields of `linear.Schedule` in which the training differs from the paper's.

    Raises:
        UserError: a run without weights, labels or validation images.
        RunStopped: a feature or the loss is not finite, or too many images cannot be used.
    """
    config = resolve(run / "config.yaml")
    require_writable(run)
    with process_group.session() as world:
        backbone, metadata, train, val = open_run(run, config, world, "a linear classifier")
        console = new_console(quiet=world.rank != 0)
        dtype = autocast_dtype(config.engine.precision, world.device)
        say = partial(console.print, soft_wrap=True)
        probe = linear.LinearProbe(config, world, train, val, backbone, dtype, say)
        if protocol == "quick":
            classifier = probe.quick()
            settings = {"l2": linear.L2, "most_iterations": linear.MOST_ITERATIONS}
            name = (
                "quick protocol (logistic regression on standardised features of centre crops, "
                f"L2 {linear.L2:g}, at most {linear.MOST_ITERATIONS} iterations of L-BFGS)"
            )
        else:
            schedule = replace(linear.PAPER, **changes)
            changes = {key: value for key, value in changes.items() if value != getattr(linear.PAPER, key)}
            classifier = probe.paper(schedule)
            settings = asdict(schedule)
            name = "paper protocol (LARS on random crops" + "".join(f", {k} {v:g}" for k, v in settings.items()) + ")"
            if changes:
                name += ", but " + ", ".join(f"{key} {value:g}" for key, value in changes.items())
        result = probe.judge(classifier)
        if world.rank != 0:
            return
        about = {"protocol": protocol, "branch": BRANCH, **metadata, **settings, **asdict(result)}
        weights = {"weight": classifier.weight.detach().cpu(), "bias": classifier.bias.detach().cpu()}
        texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in about.items()}
        write_whole(run / "linear.safetensors", save(weights, {**texts, "classes": json.dumps(list(train.classes))}))
        write_whole(run / "linear.json", json.dumps(about, indent=2).encode() + b"\n")
        title = f"linear probe, {BRANCH}: {name}, {result.images:,} validation images"
        table = Table(title=title, title_justify="left")
        for column in ("features", "top-1 accuracy, %", "top-5 accuracy, %"):
            table.add_column(column, justify="left" if column == "features" else "right")
        top5 = "–" if result.top5 is None else f"{result.top5:.2f}"
        table.add_row(f"trained encoder, epoch {metadata['epoch']}", f"{result.accuracy:.2f}", top5)
        console.print(table)


def open_run(
    run: Path, config: Config, world: World, classifier: str
) -> tuple[nn.Module, dict[str, str], Manifest, Manifest]:
    """The trained online backbone, what its checkpoint says, and the images to train and judge a classifier on.

    Raises:
        UserError: a run without weights, labels or validation images.
    """
    backbone = build_encoder(config.model, config.seed, world.device).backbone
    metadata = load_encoder(run, backbone)
    train, val, _ = read_manifests(config, world)
    if obstacle := KNNProbe.obstacle(train, val):
        raise UserError(f"this run cannot be evaluated by {classifier}: {obstacle}")
    return backbone, metadata, train, val


def require_writable(run: Path) -> None:
    if not os.access(run, os.W_OK):
        raise UserError(f"{run}: not writable, and the result is written there; check its permissions")


def report(run: Path, rows: dict[str, KNNResult], metadata: dict[str, str]) -> None:
    """One table on the console, and the same numbers in RUN/knn.json."""
    console = new_console()
    for line in dict.fromkeys(line for row in rows.values() for line in row.left_out):
        console.print(line, soft_wrap=True)
    result = list(rows.values())[-1]
    table = Table(
        title=f"{PROTOCOL}, {BRANCH}: k {result.k}, T {result.temperature:g}, "
        f"{result.queries:,} validation images against {result.bank:,} training images",
        title_justify="left",
    )
    table.add_column("features")
    table.add_column("top-1 accuracy, %", justify="right")
    for name, row in rows.items():
        table.add_row(name, f"{row.accuracy:.2f}")
    console.print(table)
    written = {
        "protocol": PROTOCOL,
        "branch": BRANCH,
        **metadata,
        "k": result.k,
        "temperature": result.temperature,
        "queries": result.queries,
        "bank": result.bank,
        "accuracy": {name.partition(",")[0]: row.accuracy for name, row in rows.items()},
    }
    write_whole(run / "knn.json", json.dumps(written, indent=2).encode() + b"\n")
