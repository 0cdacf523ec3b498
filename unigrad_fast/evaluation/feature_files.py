"""`unigrad-fast evaluate features`: writes the features of images to a file."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np

from unigrad_fast.config import Config
from unigrad_fast.evaluation.passes import Keeper
from unigrad_fast.evaluation.results import versions
from unigrad_fast.evaluation.rows import Features, blocks, restored
from unigrad_fast.evaluation.runs import NOTHING_KEPT, Asked, Found, Opened, opened_on
from unigrad_fast.evaluation.writing import WRITERS, require_writer
from unigrad_fast.images.manifests import read_manifests
from unigrad_fast.pipelines import Manifest
from unigrad_fast.runtime import outputs
from unigrad_fast.runtime.errors import UserError
from unigrad_fast.runtime.files import naming, unwritable, write_whole
from unigrad_fast.runtime.process_group import World, on_first
from unigrad_fast.runtime.run_folder import RunFolder
from unigrad_fast.runtime.wording import byte_size

UNLABELLED = -1


def write_features(
    run: Path | None, images: Path | None, output: Path | None, overwrite: bool, asked: Asked
) -> outputs.Written:
    """Write file, label and feature of each usable image, in the order of the images, and a description of them.

    Args:
        run: the run folder; None with `asked.weights`.
        images: whose features; None takes the training images of the run.
        output: the file; None is features-epochE.npz in RUN/export, or in the folder of results of the weights.
        overwrite: replace an existing file and its description.
        asked: the encoder, and whether its features are kept.

    Raises:
        UserError: there are no weights or images, or the file cannot be written.
        RunStopped: a feature is not finite, or too many images cannot be used.
    """
    if output is not None:
        _require(output, images, overwrite)

    find = finding(images, "train", "--images")
    with opened_on(run, asked, find) as this, this.preemption.nothing_to_save(NOTHING_KEPT):
        folder = asked.output if run is None else RunFolder(run).evaluation
        path = output or (folder if run is None else RunFolder(run).exports) / f"{this.stem('features')}.npz"
        if output is None:
            _require(path, images, overwrite)
        keeper = this.keeper(folder, asked)
        beside = Path(on_first(lambda: tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent)))

        def clean(*_: object) -> None:
            shutil.rmtree(beside, ignore_errors=True)
            if keeper is not None:
                keeper.give_up()

        if this.world.rank == 0:
            this.preemption.note = clean
        try:
            kind = kind_of(this.config, images or this.config.data.train)
            found = _on_disk(this, path, kind, keeper, beside)
            return on_first(lambda: _write(path, found, this, beside))
        finally:
            if this.world.rank == 0:
                clean()


def finding(images: Path | None, usual: Literal["train", "val"], option: str) -> Found:
    """Gives `opened_on` the images at a path, or the run's; without labels, all are UNLABELLED.

    Args:
        usual: which of the run's.
        option: names others, for the error if it has none.
    """

    def find(config: Config, world: World) -> tuple[Manifest, Manifest, Manifest, list[str]]:
        path = images or getattr(config.data, usual)
        if path is None:
            raise UserError(f"data.{usual} = null: the run names no such images; add {option} IMAGES")
        manifest, _, said = read_manifests(config.data.model_copy(update={"train": path, "val": None}), world)
        if manifest.labels is None:
            manifest = replace(manifest, labels=np.full(len(manifest), UNLABELLED))
        return manifest, manifest, manifest, said

    return find


def kind_of(config: Config, images: Path | None) -> str:
    """What features of these images replace when they are kept."""
    return {config.data.train: "training", config.data.val: "validation"}.get(images, "other")


def _on_disk(this: Opened, path: Path, kind: str, keeper: Keeper | None, beside: Path) -> Features:
    """Features in files: kept ones, or those of a pass beside the output. Raises UserError if there is no room."""
    passing = Keeper(beside, {}, is_lasting=False)
    for each in filter(None, (keeper, passing)):
        found = each.read(this, this.train, kind)
        if each is keeper:
            this.tell(keeper)
        if found is not None and len(found.parts) == min(found.ranks, found.images):
            return found
    raise UserError(f"output = {path}: {passing.problems[0]}")


def _write(path: Path, found: Features, this: Opened, beside: Path) -> outputs.Written:
    manifest, positions = this.train, found.usable()
    columns = {
        "file": lambda: (names_of(manifest, block) for block in blocks(positions)),
        "label": lambda: (np.asarray(manifest.labels)[block] for block in blocks(positions)),
        "feature": lambda: (restored(rows).numpy() for _, rows in found.blocks(positions)),
    }
    types = {
        "file": np.dtype(f"U{int(np.diff(manifest.offsets).max())}"),
        "label": np.dtype(np.int64),
        "feature": np.dtype((np.float32, (found.width,))),
    }
    unfinished = beside / "unfinished"
    with naming(path):
        WRITERS[path.suffix.lower()](unfinished, columns, types, len(positions))
        _description(path).unlink(missing_ok=True)  # of the file that is replaced
        os.replace(unfinished, path)
    settings = this.settings_of_images()
    figures = {
        "root": manifest.root,
        "classes": manifest.classes,
        "counts": {"used": len(positions), "left_out": found.left_out.count},
        "width": found.width,
        "versions": versions(),
    }
    write_whole(_description(path), json.dumps({**settings, **figures}, indent=2).encode() + b"\n")
    for line in found.left_out.told("given"):
        this.say(line)
    size = byte_size(path.stat().st_size)
    line = f"features [{len(positions):,}, {found.width}]: {path} ({size}), described in {_description(path).name}"
    this.say(line)
    return outputs.Written(path, settings, figures, line)


def names_of(manifest: Manifest, positions: np.ndarray) -> np.ndarray:
    """Names of images relative to the folder of all, as valid Unicode text."""
    names = (manifest.names[slice(*manifest.offsets[[at, at + 1]])].tobytes() for at in positions.tolist())
    return np.array([name.decode(errors="replace") for name in names], np.str_)


def _require(path: Path, images: Path | None, overwrite: bool) -> None:
    """Raises UserError unless a file of features and its description can be written."""
    require_writer(path)
    for each in (path, _description(path)):
        outputs.require_file(each, {"images": images})
    outputs.require_free((path, _description(path)), overwrite)
    if problem := unwritable(path.parent):
        raise UserError(f"output = {path}: {problem}")
    path.parent.mkdir(parents=True, exist_ok=True)


def _description(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")
