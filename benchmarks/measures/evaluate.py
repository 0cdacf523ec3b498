"""Speed of the feature pass against the backbone alone, and of a sweep of linear classifiers against a single one.

    unigrad-fast bench evaluate [--backbone resnet50 --image_size 224] [--photographs FOLDER] [--output FOLDER]

    features from files      the feature pass of `evaluate`: files are read, decoded, resized and cropped
    backbone on memory       the same backbone, autocast and batches, whose images are in memory
    sweep                    a training step of `evaluate linear --protocol sweep` in parts, its images in memory
    single classifier        the same with one linear classifier

All have random weights, and 1000 classes. Variants take turns, one block of batches each per round, in one process; the
feature pass starts anew in each block, and its first batch is not counted. Rows are appended to OUTPUT/evaluate.jsonl.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unigrad_fast.benchmarks.harness.images import find_images, link_images, spread_evenly
from unigrad_fast.benchmarks.harness.processes import require_one_process
from unigrad_fast.benchmarks.harness.record import append, make_folder
from unigrad_fast.benchmarks.harness.turns import median_and_range, ratio_row, seconds, spread, take_turns
from unigrad_fast.config import resolve
from unigrad_fast.evaluation.features import evaluation_mode, features_of
from unigrad_fast.evaluation.linear import FrozenEncoder
from unigrad_fast.evaluation.linear_paper import new_classifier
from unigrad_fast.evaluation.linear_sweep import SCHEDULE, Sweep
from unigrad_fast.evaluation.linear_training import Method, Training
from unigrad_fast.evaluation.shares import own_images
from unigrad_fast.networks.encoder import build_encoder
from unigrad_fast.optimization.sgd import SGD
from unigrad_fast.pipelines import Manifest
from unigrad_fast.pipelines.manifest import part
from unigrad_fast.runtime import process_group
from unigrad_fast.runtime.console import new_console, table_of_figures
from unigrad_fast.runtime.files import require_folder
from unigrad_fast.runtime.precision import autocast_dtype
from unigrad_fast.runtime.process_group import World

CLASSES = 1000
FILES, MEMORY, SWEEP, SINGLE = "features from files", "backbone on memory", "sweep", "single classifier"


def encoder_of(backbone: str, image_size: int, batch_size: int, images: Manifest, world: World) -> FrozenEncoder:
    """A frozen encoder with random weights, in the precision of `evaluate`."""
    changes = {
        "model": {"backbone": backbone},
        "data": {"train": "/nowhere", "image_size": image_size},
        "evaluation": {"batch_size": batch_size},
    }
    config = resolve("imagenet_100ep", changes)
    count = len(images)
    labelled = part(images, np.arange(count), np.arange(count) % CLASSES, [f"{number}" for number in range(CLASSES)])
    network = build_encoder(config.model, 0, world.device).backbone.to(memory_format=torch.channels_last)
    dtype = autocast_dtype(config.engine.precision, world.device)
    return FrozenEncoder(config, world, labelled, images, network, dtype, lambda line: None)


def from_files(encoder: FrozenEncoder) -> Callable[[], float]:
    """A block of the feature pass: images/s after the first batch."""

    def block() -> float:
        loader = own_images(encoder.val, encoder.config.data, encoder.config.evaluation, encoder.world)
        passed = features_of(encoder.backbone, loader, encoder.world.device, encoder.dtype)
        next(passed)
        images = 0

        def run() -> None:
            nonlocal images
            images = sum(len(features) for features, _ in passed)

        took = seconds(run, encoder.world.device)
        return images / took

    return block


def on_memory(encoder: FrozenEncoder, batches: list[Tensor]) -> Callable[[], float]:
    """A block of the backbone alone: images/s."""

    def run() -> None:
        with torch.no_grad(), evaluation_mode(encoder.backbone):
            for images in batches:
                encoder.features(images)

    return lambda: sum(map(len, batches)) / seconds(run, encoder.world.device)


def training(encoder: FrozenEncoder, method: Method, batches: list[Tensor]) -> Callable[[], float]:
    """A block that is a training step of linear classifiers, in as many parts as there are batches: images/s."""
    size = len(batches[0])
    state = Training(encoder, replace(SCHEDULE, batch_size=size * len(batches)), method, 10**6)
    labels = torch.arange(size) % CLASSES

    def run() -> None:
        for images in batches:
            state.add(SimpleNamespace(views=[images], label=labels, index=labels, failures=[]))
        state.step()

    return lambda: size * len(batches) / seconds(run, encoder.world.device)


def blocks(encoder: FrozenEncoder, batches: list[Tensor]) -> dict[str, Callable[[], float]]:
    """By variant, a function that measures its images/s."""
    sweep = Sweep(encoder, "val")
    single = Method(new_classifier, lambda parameters, lr: SGD(parameters, lr=lr, momentum=0.9), kind="cosine")
    return {
        FILES: from_files(encoder),
        MEMORY: on_memory(encoder, batches),
        SWEEP: training(sweep.encoder, sweep.method, batches),
        SINGLE: training(encoder, single, batches),
    }


def rows_of(speeds: dict[str, list[float]]) -> list[dict[str, Any]]:
    """A row per variant, and the two ratios; of the second, how much longer the sweep takes."""
    rows = [{"what": what, "unit": "images/s", **spread(found)} for what, found in speeds.items()]
    rows.append(ratio_row(f"images/s, {FILES} / {MEMORY}", speeds[FILES], speeds[MEMORY]))
    rows.append(ratio_row(f"time, {SWEEP} / {SINGLE}", speeds[SINGLE], speeds[SWEEP]))
    return rows


def main(
    backbone: str,
    image_size: int,
    batch_size: int,
    batches: int,
    repetitions: int,
    photographs: Path | None,
    output: Path,
) -> None:
    """Measure, print the table and append the rows, with the options of `unigrad-fast bench evaluate`.

    Raises:
        UserError: the environment says that this is one of several processes; `output` is a file.
        DataError: no image can be decoded.
    """
    require_one_process("bench evaluate")
    require_folder(output)
    make_folder(output)
    console = new_console()
    with (
        tempfile.TemporaryDirectory() as folder,
        process_group.session() as world,
        console.status("starting") as status,
    ):
        paths, described = find_images(photographs, Path(folder) / "images")
        chosen = [paths[number] for number in spread_evenly(len(paths), batch_size * (batches + 1))]
        images = Manifest.from_folder(link_images(chosen, Path(folder) / "links"))
        encoder = encoder_of(backbone, image_size, batch_size, images, world)
        loader = own_images(images, encoder.config.data, encoder.config.evaluation, world)
        in_memory = [batch.clone(memory_format=torch.preserve_format) for batch, _ in loader][:batches]
        speeds = take_turns(blocks(encoder, in_memory), repetitions, warmup=1, report=lambda what: status.update(what))
        setting = {"backbone": backbone, "image_size": image_size, "batch_size": batch_size, "batches": batches}
        setting |= {"images": described, "classes": CLASSES, "device": world.device.type}
        setting |= {"precision": str(encoder.dtype or torch.float32)[6:], "threads": torch.get_num_threads()}
        rows = [{**setting, **row} for row in rows_of(speeds)]
    table = table_of_figures(
        "", "median", "least to most", title=f"{backbone}, {image_size} px, {described}", title_justify="left"
    )
    for row in rows:
        table.add_row(f"{row['what']}, {row['unit']}", *median_and_range(row, 2 if row["unit"] == "ratio" else 1))
    console.print(table)
    console.print(f"rows appended to {append(output, 'evaluate', rows)}")
