"""`unigrad-fast evaluate`: evaluates the encoder of a finished or running run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table

from unigrad_fast.checkpoints.weights import configuration, fingerprint, load_encoder, open_checkpoint
from unigrad_fast.config import Config
from unigrad_fast.evaluation import linear_paper, linear_quick, linear_sweep, linear_training
from unigrad_fast.evaluation.baselines import BASELINES
from unigrad_fast.evaluation.classes import match, without_unused
from unigrad_fast.evaluation.knn import BRANCH, PROTOCOL, KNNResult, require_k
from unigrad_fast.evaluation.knn_probe import FINDS_ITSELF, KNNProbe
from unigrad_fast.evaluation.linear import WAS_FITTED, FrozenEncoder, Judged
from unigrad_fast.evaluation.results import folder_of, write_result
from unigrad_fast.evaluation.unfinished import Unfinished
from unigrad_fast.images.manifests import digest, read_manifests, same_images
from unigrad_fast.networks.encoder import build_encoder
from unigrad_fast.pipelines import Manifest
from unigrad_fast.runtime import process_group
from unigrad_fast.runtime.console import new_console
from unigrad_fast.runtime.errors import DataError, UserError
from unigrad_fast.runtime.precision import autocast_dtype, tensor_float32
from unigrad_fast.runtime.preemption import Preemption
from unigrad_fast.runtime.process_group import World
from unigrad_fast.runtime.processors import compute_threads

SCHEDULES = {"paper": linear_paper.SCHEDULE, "sweep": linear_sweep.SCHEDULE}
NOTHING_KEPT = "nothing was saved; repeat the command to start again"


@dataclass(frozen=True)
class Asked:
    """Options of an evaluation that override the run's.

    Attributes:
        checkpoint: step of the checkpoint; None for the newest.
        train, val: paths of the images.
        k, temperature: settings of kNN.
        output: folder of the results; None for RUN/evaluation.
    """

    checkpoint: int | None = None
    train: Path | None = None
    val: Path | None = None
    k: int | Literal["auto"] | None = None
    temperature: float | None = None
    output: Path | None = None

    def of(self, config: Config) -> Config:
        """The configuration with these options applied."""
        data = {"train": self.train, "val": self.val}
        knn = {"k": self.k, "temperature": self.temperature}
        data, knn = ({key: value for key, value in part.items() if value is not None} for part in (data, knn))
        evaluation = config.evaluation.model_copy(update={"knn": config.evaluation.knn.model_copy(update=knn)})
        return config.model_copy(update={"data": config.data.model_copy(update=data), "evaluation": evaluation})


@dataclass(frozen=True)
class Opened(FrozenEncoder):
    """A run's trained online backbone and its images, on one rank.

    Attributes:
        settings: JSON values that identify the weights and the images of a result.
        paths: paths of the images.
        console: silent on all ranks but the first.
        preemption: tells when to stop.
    """

    settings: Mapping[str, Any]
    paths: Mapping[str, Any]
    console: Console
    preemption: Preemption


def evaluate_knn(run: Path, baselines: bool, asked: Asked) -> None:
    """Print the kNN accuracy of a run's online backbone and write it to knn-epochE.json in RUN/evaluation.

    Args:
        run: the run folder.
        baselines: also evaluate raw pixels, colour histograms and the untrained encoder.
        asked: checkpoint, images and settings that override the run's.

    Raises:
        UserError: the run has no weights, labels or validation images, or `asked.k` exceeds the training images.
        RunStopped: a feature is not finite, or too many images cannot be used.
    """
    folder = folder_of(run, asked.output)
    with opened(run, asked, "kNN", FINDS_ITSELF) as this, this.preemption.nothing_to_save(NOTHING_KEPT):
        if isinstance(asked.k, int):
            require_k(asked.k, len(this.train))
        probe = KNNProbe(this.config.data, this.config.evaluation, this.world, this.train, this.val)
        rows: dict[str, KNNResult] = {}
        if baselines:
            for name, (features, size) in BASELINES.items():
                rows[name] = probe(features, None, image_size=size, crop_fraction=1.0)
            untrained = build_encoder(this.config.model, this.config.seed, this.world.device).backbone
            rows["untrained encoder"] = probe(untrained, this.dtype)
        rows["trained encoder"] = probe(this.backbone, this.dtype)
        if this.world.rank != 0:
            return
        for line in dict.fromkeys(line for row in rows.values() for line in row.left_out):
            this.say(line)
        if few := probe.few_images(rows["trained encoder"].bank):
            this.say(few)
        result, epoch = rows["trained encoder"], f"{this.settings['epoch']:g}"
        title = (
            f"{PROTOCOL}, {BRANCH}: k {result.k}, T {result.temperature:g}, "
            f"{result.queries:,} validation images against {result.bank:,} training images"
        )
        table = [(name, f"{row.accuracy:.2f}") for name, row in rows.items()]
        table[-1] = (f"trained encoder, epoch {epoch}", table[-1][1])
        print_table(this.console, title, table, 1)
        settings = {key: getattr(result, key) for key in ("k", "temperature", "queries", "bank")}
        written = write_result(
            folder,
            f"knn-epoch{epoch}",
            {"protocol": PROTOCOL, "branch": BRANCH, **this.settings, **settings},
            {**this.paths, "accuracy": {name: row.accuracy for name, row in rows.items()}},
        )
        this.say(written)


def evaluate_linear(run: Path, protocol: str, changes: dict[str, int | float], choose: str, asked: Asked) -> None:
    """Print the accuracy of a linear classifier on a run's frozen online backbone.

    Write it to RUN/evaluation/linear-PROTOCOL-epochE.json, and the classifier to a .safetensors file next to it.

    Args:
        run: the run folder.
        protocol: "quick", "paper" or "sweep".
        changes: fields of the schedule that differ from the protocol's.
        choose: on which images the sweep chooses: "val", or "train" for a held-out tenth of the training images.
        asked: checkpoint and images that override the run's.

    Raises:
        UserError: the run has no weights, labels or validation images.
        RunStopped: a feature or the loss is not finite, or too many images cannot be used.
        Preempted: in the paper's protocol, after saving.
    """
    folder = folder_of(run, asked.output)
    with opened(run, asked, "a linear classifier", WAS_FITTED) as this:
        classes: dict[str, Any] = {"classes": this.train.classes}
        train, val, numbers = without_unused(this.train, this.val)
        if numbers is not None:
            outputs = len(this.train.classes)
            classes = {"classes": train.classes, "numbers": numbers.tolist(), "outputs": outputs}
            this.say(
                f"{len(numbers):,} of {outputs:,} class numbers have training images; the classifier has only these"
            )
            this = replace(this, train=train, val=val)
        stem, unfinished = f"linear-{protocol}-epoch{this.settings['epoch']:g}", None
        about: dict[str, Any] = {"protocol": protocol, "branch": BRANCH, **this.settings}
        if protocol == "quick":
            about |= {"l2": linear_quick.L2, "most_iterations": linear_quick.MOST_ITERATIONS}
            with this.preemption.nothing_to_save(NOTHING_KEPT):
                judge = partial(Judged.by, this, linear_quick.quick(this))
            done = NOTHING_KEPT
        else:
            schedule = replace(SCHEDULES[protocol], **changes)
            about |= {**asdict(schedule), "seed": this.config.seed}
            if protocol == "sweep":
                about["choose"] = choose
            unfinished = Unfinished(folder, stem, about, this.say)
            if protocol == "sweep":
                sweep = linear_sweep.Sweep(this, choose)
                heads = linear_training.train(sweep.encoder, schedule, sweep.method, unfinished, this.preemption)
                judge = partial(sweep.judge, heads, schedule.base_lr)
            else:
                classifier = linear_training.train(this, schedule, linear_paper.METHOD, unfinished, this.preemption)
                judge = partial(Judged.by, this, classifier)
            done = "the trained classifier is saved; repeat the command to continue"
        with this.preemption.nothing_to_save(done):
            judged = judge()
        if this.world.rank != 0:
            return
        title = f"linear probe, {BRANCH}: {described(protocol, changes)}, {judged.images:,} validation images"
        shown = f"{judged.accuracy:.2f}", "–" if judged.top5 is None else f"{judged.top5:.2f}"
        row = (f"trained encoder, epoch {this.settings['epoch']:g}", *shown)
        print_table(this.console, title, [row], 2)
        if judged.said:
            this.say(judged.said)
        written = write_result(
            folder,
            stem,
            {**about, "images": judged.images},
            {**this.paths, "accuracy": judged.accuracy, "top5": judged.top5, **judged.figures},
            {"weight": judged.classifier.weight, "bias": judged.classifier.bias},
            classes,
        )
        if unfinished is not None:
            unfinished.delete()
        this.say(written)


def described(protocol: str, changes: Mapping[str, int | float]) -> str:
    """A linear protocol with its settings, and those that differ from the paper's."""
    if protocol == "quick":
        return (
            "quick protocol (logistic regression on standardised features of centre crops, "
            f"L2 {linear_quick.L2:g}, at most {linear_quick.MOST_ITERATIONS} iterations of L-BFGS)"
        )
    usual = asdict(SCHEDULES[protocol])
    settings = "".join(f", {key} {value:g}" for key, value in {**usual, **changes}.items())
    differing = ", ".join(f"{key} {value:g}" for key, value in changes.items() if value != usual[key])
    optimizer = {"paper": "LARS", "sweep": f"{linear_sweep.COUNT} classifiers by SGD"}[protocol]
    return f"{protocol} protocol ({optimizer} on random crops{settings})" + (f", but {differing}" if differing else "")


@contextmanager
def opened(run: Path, asked: Asked, classifier: str, same: str) -> Iterator[Opened]:
    """Opens a run's encoder and images, with a process group and signal handlers.

    Args:
        classifier: names it in an error.
        same: for the warning of `same_images`.

    Raises:
        UserError: the run has no weights, labels or validation images.
    """
    with ExitStack() as stack:
        preemption = stack.enter_context(Preemption())
        with preemption.nothing_to_save("stopped before ranks connected"):
            reader = open_checkpoint(run, asked.checkpoint)
            config, told = configuration(run, reader)
            world = stack.enter_context(process_group.session(config.engine.device))
        stack.push(preemption.settle)
        threads = stack.enter_context(compute_threads(world.device))
        console = new_console(quiet=world.rank != 0)
        with preemption.nothing_to_save("nothing was computed yet"):
            for line in told:
                console.print(f"warning: {line}", soft_wrap=True)
            config = asked.of(config)
            stack.enter_context(tensor_float32(config.engine.tf32))
            backbone = build_encoder(config.model, config.seed, world.device).backbone
            load_encoder(reader, backbone)
            train, val, said = _manifests(config, asked, world)
            said += same_images(config.data, same)
            queries = match(train, val)
            if queries.obstacle is not None:
                raise UserError(f"{classifier} cannot evaluate this run: {queries.obstacle.told(config.data)}")
        dtype = autocast_dtype(config.engine.precision, world.device)
        this = Opened(
            config=config,
            world=world,
            train=train,
            val=queries.val,
            backbone=backbone,
            dtype=dtype,
            say=partial(console.print, soft_wrap=True),
            settings={
                "step": reader.about["step"],
                "epoch": reader.about["epoch"],
                "weights": fingerprint(reader),
                "train_images": digest(train),
                "val_images": digest(val),
                "image_size": config.data.image_size,
                "crop_fraction": config.evaluation.crop_fraction,
                "precision": str(dtype or torch.float32)[6:],
            },
            paths={"data": {"train": str(config.data.train), "val": str(config.data.val)}},
            console=console,
            preemption=preemption,
        )
        if threads.said:
            this.say(threads.said)
        for line in [*filter(None, [threads.warning]), *said, *queries.told]:
            this.say(f"warning: {line}")
        yield this


def _manifests(config: Config, asked: Asked, world: World) -> tuple[Manifest, Manifest | None, list[str]]:
    """As `read_manifests`; where a path of the run is gone, the error names the option that gives another."""
    try:
        return read_manifests(config.data, world)
    except DataError as error:  # on all ranks
        paths = {key: getattr(config.data, key) for key in ("train", "val") if getattr(asked, key) is None}
        gone = [f"--data.{key} PATH" for key, path in paths.items() if path is not None and not os.path.exists(path)]
        if not gone:
            raise
        raise DataError(f"{error}; if this run's images were moved, add {' and '.join(gone)}") from None


def print_table(console: Console, title: str, rows: Sequence[Sequence[str]], accuracies: int) -> None:
    table = Table(title=title, title_justify="left")
    for column in ("features", "top-1 accuracy, %", "top-5 accuracy, %")[: 1 + accuracies]:
        table.add_column(column, justify="left" if column == "features" else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)
