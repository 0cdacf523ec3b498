"""Opens the encoder of a finished or running run, or of a file of weights, with its images, for an evaluation."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table

from unigrad_fast.config import Config
from unigrad_fast.evaluation.classes import match
from unigrad_fast.evaluation.linear import FrozenEncoder
from unigrad_fast.evaluation.passes import Keeper
from unigrad_fast.evaluation.sources import Source, of_file, of_run
from unigrad_fast.images.manifests import evaluated, read_manifests, same_images
from unigrad_fast.networks.encoder import build_encoder
from unigrad_fast.pipelines import Manifest
from unigrad_fast.pipelines.presets import DEVIATION, MEAN, short_side
from unigrad_fast.pipelines.spelling import is_there
from unigrad_fast.runtime import process_group
from unigrad_fast.runtime.console import new_console
from unigrad_fast.runtime.errors import DataError, UserError
from unigrad_fast.runtime.precision import autocast_dtype, tensor_float32
from unigrad_fast.runtime.preemption import Preemption
from unigrad_fast.runtime.process_group import World
from unigrad_fast.runtime.processors import compute_threads

INTERPOLATION = "bilinear, antialiased"  # of the evaluation's loader
Found = Callable[[Config, World], tuple[Manifest, Manifest, Manifest, list[str]]]
NOTHING_KEPT = "nothing was saved; repeat the command to start again"


@dataclass(frozen=True)
class Asked:
    """Options of an evaluation that override the run's.

    Attributes:
        checkpoint: step of the checkpoint; None for the newest.
        train, val: paths of the images.
        k, temperature: settings of kNN.
        output: folder of the results; None for RUN/evaluation.
        weights, backbone: a file and the name of the backbone in it, in place of a run; then `output` is given.
        image_size: side in pixels of the images for such a backbone; None for the usual one.
        keep_features: keep the features of plain images for the next evaluation.
    """

    checkpoint: int | None = None
    train: Path | None = None
    val: Path | None = None
    k: int | Literal["auto"] | None = None
    temperature: float | None = None
    output: Path | None = None
    weights: Path | None = None
    backbone: str | None = None
    image_size: int | None = None
    keep_features: bool = True

    def source(self, run: Path | None) -> Source:
        """The encoder. Raises UserError if there is none."""
        if run is not None:
            return of_run(run, self.checkpoint)
        assert self.weights is not None and self.backbone is not None
        return of_file(self.weights, self.backbone, self.image_size)

    def of(self, config: Config) -> Config:
        """The configuration with these options applied."""
        data = {"train": self.train, "val": self.val}
        knn = {"k": self.k, "temperature": self.temperature}
        data, knn = ({key: value for key, value in part.items() if value is not None} for part in (data, knn))
        evaluation = config.evaluation.model_copy(update={"knn": config.evaluation.knn.model_copy(update=knn)})
        return config.model_copy(update={"data": config.data.model_copy(update=data), "evaluation": evaluation})


@dataclass(frozen=True)
class Opened(FrozenEncoder):
    """A trained backbone, of a run or of a file of weights, and its images, on one rank.

    Attributes:
        name: what a table calls the weights: their epoch, or their file.
        settings: JSON values for which a result is valid: the weights, the images and how they are prepared.
        paths: paths of the images.
        listed: number of training and of validation images, with those of other classes.
        console: silent on all ranks but the first.
        preemption: tells when to stop.
    """

    name: str
    settings: Mapping[str, Any]
    paths: Mapping[str, Any]
    listed: Mapping[str, int]
    console: Console
    preemption: Preemption

    def stem(self, protocol: str) -> str:
        """The start of the names of a protocol's results."""
        epoch = self.settings["epoch"]
        return protocol if epoch is None else f"{protocol}-epoch{epoch:g}"

    def counts(self) -> dict[str, dict[str, int]]:
        """Numbers of images that were used and left out, for a result."""
        used = {kind: len(images) - self.left_out.get(kind, 0) for kind, images in self.images().items()}
        return {kind: {"used": count, "left_out": self.listed[kind] - count} for kind, count in used.items()}

    def settings_of_images(self) -> dict[str, Any]:
        """`settings` where there is one set of images."""
        others = {key: value for key, value in self.settings.items() if key not in ("train_images", "val_images")}
        return others | {"images": self.settings["train_images"]}

    def images(self) -> dict[str, Manifest]:
        return {"training": self.train, "validation": self.val}

    def keeper(self, folder: Path, asked: Asked) -> Keeper | None:
        """Keeps features in FOLDER/features, as far as it was not refused; a signal leaves no unfinished ones."""
        if not asked.keep_features:
            return None
        names = ("branch", "backbone", "weights", "transform", "precision")
        config = self.config
        machine = {"device": self.world.device.type, "decode": config.data.decode, "tf32": config.engine.tf32}
        keeper = Keeper(folder / "features", {name: self.settings[name] for name in names} | machine)
        if self.world.rank == 0:
            self.preemption.note = lambda status, said: keeper.give_up()
        return keeper

    def tell(self, keeper: Keeper | None) -> None:
        for line in [] if keeper is None else keeper.told():
            self.say(line)


@contextmanager
def opened(run: Path | None, asked: Asked, classifier: str, same: str) -> Iterator[Opened]:
    """Opens the encoder of a run or of a file of weights, and its images, with a process group and signal handlers.

    Args:
        classifier: names it in an error.
        same: for the warning of `same_images`.

    Raises:
        UserError: there are no weights, labels or validation images.
    """

    def find(config: Config, world: World) -> tuple[Manifest, Manifest, Manifest, list[str]]:
        train, val, said = _manifests(config, asked, world)
        said += same_images(config.data, same)
        queries = match(train, val)
        if queries.obstacle is not None:
            whom = "these weights" if run is None else "this run"
            raise UserError(f"{classifier} cannot evaluate {whom}: {queries.obstacle.told(config.data)}")
        return train, val, queries.val, [*said, *queries.told]

    with opened_on(run, asked, find) as this:
        yield this


@contextmanager
def opened_on(
    run: Path | None,
    asked: Asked,
    find: Found,
) -> Iterator[Opened]:
    """As `opened`, on any images.

    Args:
        find: gives the training images, all validation images, those of them that are judged, and warnings.
    """
    with ExitStack() as stack:
        preemption = stack.enter_context(Preemption())
        with preemption.nothing_to_save("stopped before ranks connected"):
            source = asked.source(run)
            config = source.config
            world = stack.enter_context(process_group.session(config.engine.device))
        stack.push(preemption.settle)
        threads = stack.enter_context(compute_threads(world.device))
        console = new_console(quiet=world.rank != 0)
        with preemption.nothing_to_save("nothing was computed yet"):
            for line in (*source.said, *(f"warning: {line}" for line in source.warned)):
                console.print(line, soft_wrap=True)
            config = asked.of(config)
            stack.enter_context(tensor_float32(config.engine.tf32))
            backbone = build_encoder(config.model, config.seed, world.device).backbone
            source.load(backbone)
            train, val, judged, said = find(config, world)
        dtype = autocast_dtype(config.engine.precision, world.device)
        this = Opened(
            config=config,
            world=world,
            train=train,
            val=judged,
            backbone=backbone,
            dtype=dtype,
            say=partial(console.print, soft_wrap=True),
            name=source.name,
            settings={
                **source.about,
                "backbone": config.model.backbone,
                "weights": source.digest(),
                "train_images": evaluated(train),
                "val_images": evaluated(val),
                "image_size": config.data.image_size,
                "crop_fraction": config.evaluation.crop_fraction,
                "transform": {
                    "resize": short_side(config.data.image_size, config.evaluation.crop_fraction),
                    "crop": config.data.image_size,
                    "interpolation": INTERPOLATION,
                    "mean": MEAN,
                    "deviation": DEVIATION,
                },
                "labels": label_map(train),
                "seed": config.seed,
                "precision": str(dtype or torch.float32)[6:],
            },
            paths={
                **({} if run is not None else {"file": str(asked.weights)}),
                "data": {"train": str(config.data.train), "val": str(config.data.val)},
            },
            listed={"training": len(train), "validation": len(val)},
            console=console,
            preemption=preemption,
        )
        if threads.said:
            this.say(threads.said)
        for line in [*filter(None, [threads.warning]), *said]:
            this.say(f"warning: {line}")
        yield this


def label_map(train: Manifest) -> dict[str, Any]:
    """Number of the classes, and a digest of their names in the order of the labels."""
    names = "\0".join(train.classes).encode(errors="surrogateescape")
    return {"classes": len(train.classes), "digest": f"sha256-{hashlib.sha256(names).hexdigest()[:16]}"}


def _manifests(config: Config, asked: Asked, world: World) -> tuple[Manifest, Manifest | None, list[str]]:
    """As `read_manifests`; where a path of the run is gone, the error names the option that gives another."""
    try:
        return read_manifests(config.data, world)
    except DataError as error:  # on all ranks
        paths = {key: getattr(config.data, key) for key in ("train", "val") if getattr(asked, key) is None}
        gone = [f"--data.{key} PATH" for key, path in paths.items() if path is not None and not is_there(path)]
        if not gone:
            raise
        raise DataError(f"{error}; if this run's images were moved, add {' and '.join(gone)}") from None


def print_table(console: Console, title: str, rows: Sequence[Sequence[str]]) -> None:
    table = Table(title=title, title_justify="left")
    for column in ("features", "top-1 accuracy, %", "top-5 accuracy, %"):
        table.add_column(column, justify="left" if column == "features" else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)
