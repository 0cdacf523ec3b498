"""One pass of features over a set of images, which the next evaluation reads too: kept on the disk.

RUN/evaluation/features/training-0f1e2d3c4b5a6978/    named by all that the features depend on
    about.json                                        that, ranks and digests of the pass, images that failed
    rank-00000.npy                                    rows, fp16 [n, D + 1], of one rank; all ranks can read all files
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from unigrad_fast.evaluation.features import count_left_out, extract
from unigrad_fast.evaluation.linear import FrozenEncoder
from unigrad_fast.evaluation.rows import Features, halved
from unigrad_fast.evaluation.shares import own_images
from unigrad_fast.images.manifests import digest
from unigrad_fast.pipelines import EvaluationLoader, Failure, Manifest
from unigrad_fast.runtime.files import write_whole
from unigrad_fast.runtime.process_group import World, gather, on_all_ranks, on_first
from unigrad_fast.runtime.wording import byte_size, count

FORMAT = 2
DAY = 24 * 3600.0  # seconds
LARGEST_SHARE = 0.5  # of the free space that kept features may take: others write to the disk, too


@dataclass
class Keeper:
    """Features on the disk, for one encoder; of each kind of images the newest are kept. All ranks call it together.

    Args:
        folder: the folder of all features.
        depends_on: JSON values that determine features, apart from the images.
        is_lasting: later calls read them, so that those of a pass in which the storage failed are not kept.

    Attributes:
        read_from_disk, made: numbers of images whose features were there, and whose features a pass added.
        size: of what was added, bytes.
        problems: lines for the user about what was not kept.
        unfinished: the folder of the pass that is being made, or of the last one.
    """

    folder: Path
    depends_on: Mapping[str, Any]
    is_lasting: bool = True
    read_from_disk: int = 0
    made: int = 0
    size: int = 0
    problems: list[str] = field(default_factory=list)
    unfinished: Path | None = field(default=None, init=False)

    def told(self) -> list[str]:
        """Lines for the user."""
        lines = list(self.problems)
        if self.read_from_disk:
            lines.append(f"features of {self.read_from_disk:,} images were read from {self.folder}")
        if self.made:
            lines.append(f"features of {self.made:,} images are kept in {self.folder} ({byte_size(self.size)})")
        return lines

    def read(self, encoder: FrozenEncoder, manifest: Manifest, kind: str) -> Features | None:
        """Features of images: those on the disk, or those of a pass whose features go there; None if there is no room.

        Raises RunStopped if a feature is not finite or too many images cannot be used.
        """
        depends_on = {**self.depends_on, "images": digest(manifest), "files": manifest.fingerprint}
        name = hashlib.sha256(json.dumps(depends_on, sort_keys=True).encode()).hexdigest()[:16]
        most = encoder.config.data.max_bad_fraction
        for folder in on_first(lambda: sorted(self.folder.glob(f"*-{name}"))):
            found = self._open(folder, len(manifest), most, is_new=False)
            if found is not None:
                self.read_from_disk += len(manifest)
                return found
        unfinished = self.unfinished = (
            self.folder / f".{kind}-{name}.unfinished-{on_first(lambda: uuid.uuid4().hex[:8])}"
        )
        try:
            rows, problem = self._allocate(unfinished, encoder, len(manifest))
            if problem:
                self.problems.append(f"features of the {kind} images are not kept: {problem}")
                return None
            return self._make(unfinished, self.folder / f"{kind}-{name}", encoder, manifest, kind, depends_on, rows)
        finally:
            if encoder.world.rank == 0:
                self.give_up()

    def give_up(self) -> None:
        """Removes what is not finished. Call on one rank; also from another thread before the process ends."""
        if self.unfinished is not None:
            shutil.rmtree(self.unfinished, ignore_errors=True)

    def _make(
        self,
        unfinished: Path,
        final: Path,
        encoder: FrozenEncoder,
        manifest: Manifest,
        kind: str,
        depends_on: Mapping[str, Any],
        rows: np.memmap | None,
    ) -> Features:
        """The features of a pass, in the files of a folder that gets its final name."""
        world, most = encoder.world, encoder.config.data.max_bad_fraction
        loader = own_images(manifest, encoder.config.data, encoder.config.evaluation, world)
        made, failures = _pass(
            encoder.backbone,
            loader,
            world,
            encoder.dtype,
            most,
            lambda count, width: torch.from_numpy(rows) if count else torch.empty(0, 0),
        )
        about = {
            "format": FORMAT,
            "depends_on": depends_on,
            "images": len(manifest),
            "ranks": world.size,
            "columns": made.shape[1],
            "failures": [[int(each.step), int(each.image), each.path, each.reason] for each in failures],
        }
        found, problem = None, _unread(failures) if self.is_lasting else ""
        try:
            if not problem:
                on_all_ranks(lambda: None if rows is None else rows.flush())
                about["digests"] = [each for each in gather(None if rows is None else _digest(rows)) if each]
                on_first(lambda: self._complete(unfinished, final, about))
                found = self._open(final, len(manifest), most, is_new=True)
                problem = "not all ranks can read them"
                if found is None:
                    on_first(lambda: shutil.rmtree(final, ignore_errors=True))
        except OSError as error:  # on all ranks; another evaluation may be making the same features
            problem = f"{error.filename or final}: {error.strerror}"
        if found is None:
            self.problems.append(f"features of the {kind} images are not kept: {problem}")
            return _features(len(manifest), world.size, {world.rank: made.numpy()}, failures, most)
        self.made += len(manifest)
        self.size += sum(part.nbytes for part in found.parts.values())
        return found

    def _allocate(self, folder: Path, encoder: FrozenEncoder, images: int) -> tuple[np.memmap | None, str]:
        """This rank's rows in its file, whose blocks are reserved; or None, and why there is no room on some rank."""
        world, width = encoder.world, encoder.width() + 1
        rows, problem = None, ""
        size = 2 * images * width
        try:
            on_all_ranks(lambda: folder.mkdir(parents=True, exist_ok=True))
            free = on_first(lambda: shutil.disk_usage(folder).free)
            if size > LARGEST_SHARE * free:
                remedy = "add --keep_features false" if self.is_lasting else "give another folder with --output"
                problem = (
                    f"they take {byte_size(size)}, more than half of the {byte_size(free)} that are free in "
                    f"{self.folder if self.is_lasting else self.folder.parent}; free some, or {remedy}"
                )
            elif world.rank < images:
                count = len(range(world.rank, images, world.size))
                file = folder / f"rank-{world.rank:05}.npy"
                rows = np.lib.format.open_memmap(file, "w+", np.float16, (count, width))
                with open(file, "r+b") as opened:  # writing to a hole of a mapped file on a full disk kills a process
                    os.posix_fallocate(opened.fileno(), 0, os.fstat(opened.fileno()).st_size)
        except OSError as error:
            problem = f"{error.filename or folder}: {error.strerror}"
        return rows, next(filter(None, gather(problem)), "")

    def _complete(self, unfinished: Path, final: Path, about: Mapping[str, Any]) -> None:
        """Give the folder its name, and remove what it replaces."""
        write_whole(unfinished / "about.json", json.dumps(about).encode())
        kind = final.name.partition("-")[0]
        abandoned = filter(_is_abandoned, self.folder.glob(f".{kind}-*.unfinished-*"))
        for other in [*self.folder.glob(f"{kind}-*"), *abandoned]:
            shutil.rmtree(other, ignore_errors=True)
        os.rename(unfinished, final)

    def _open(self, folder: Path, images: int, most: float, is_new: bool) -> Features | None:
        """The features in a folder; None unless all ranks can read all of them, as they were written.

        Args:
            is_new: they were written just now, and their digests taken.
        """
        found = _read(folder, images)
        everywhere = all(gather(found is not None))
        if found is None or not everywhere:
            return None
        about, failures, parts = found
        if not (is_new or on_first(lambda: [_digest(parts[rank]) for rank in sorted(parts)] == about["digests"])):
            return None
        return _features(images, about["ranks"], parts, failures, most)


def _read(folder: Path, images: int) -> tuple[dict[str, Any], list[Failure], dict[int, np.ndarray]] | None:
    """What is said of the features in a folder, the images that failed, and rows by rank; None if they do not fit."""
    try:
        about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
        ranks, columns = about["ranks"], about["columns"]
        failures = [Failure(int(step), int(image), str(path), str(why)) for step, image, path, why in about["failures"]]
        shapes = {rank: (len(range(rank, images, ranks)), columns) for rank in range(min(ranks, images))}
        parts = {rank: np.load(folder / f"rank-{rank:05}.npy", mmap_mode="r") for rank in shapes}
        fits = (
            about["format"] == FORMAT
            and about["images"] == images
            and ranks > 0
            and len(about["digests"]) == len(parts)
            and all(0 <= failure.image < images for failure in failures)
            and all(part.dtype == np.float16 and part.flags.c_contiguous for part in parts.values())
            and {rank: part.shape for rank, part in parts.items()} == shapes
        )
    except Exception:  # arbitrary bytes can raise anything
        return None
    return (about, failures, parts) if fits else None


def _is_abandoned(folder: Path) -> bool:
    """Whether nothing was written for a day to a folder that a process, here or on another host, was filling."""
    try:
        return time.time() - max(path.stat().st_mtime for path in (folder, *folder.iterdir())) > DAY
    except OSError:  # it got its final name, or was removed
        return False


def _unread(failures: list[Failure]) -> str:
    """Why the features of a pass would lack images for ever that only this pass could not read; empty if none."""
    unread = [failure.reason for failure in failures if failure.may_pass]
    return f"{count(len(unread), 'image')} could not be read, which may pass ({unread[0]})" if unread else ""


def _digest(rows: np.ndarray) -> str:
    return hashlib.sha256(rows.data).hexdigest()


def read_features(encoder: FrozenEncoder, manifest: Manifest, kind: str, keeper: Keeper | None = None) -> Features:
    """The features of an encoder for a set of images, kept on the disk if there is a keeper and room; all ranks call
    this together.

    The rows are the same from the disk and from memory, so that an evaluation has the same result.

    Raises RunStopped if a feature is not finite or too many images cannot be used.
    """
    found = None if keeper is None else keeper.read(encoder, manifest, kind)
    if found is not None:
        return found
    config, world = encoder.config, encoder.world
    loader = own_images(manifest, config.data, config.evaluation, world)
    return new_features(encoder.backbone, loader, world, encoder.dtype, config.data.max_bad_fraction)


def new_features(
    backbone: nn.Module, loader: EvaluationLoader, world: World, dtype: torch.dtype | None, max_bad_fraction: float
) -> Features:
    """The features of a pass over the loader's images, in memory; all ranks call this together.

    Args:
        dtype, max_bad_fraction: as for `extract`.

    Raises RunStopped if a feature is not finite or too many images cannot be used.
    """
    rows, failures = _pass(
        backbone,
        loader,
        world,
        dtype,
        max_bad_fraction,
        lambda count, width: torch.empty(count, width + 1, dtype=torch.float16),
    )
    return _features(len(loader.manifest), world.size, {world.rank: rows.numpy()}, failures, max_bad_fraction)


def _pass(
    backbone: nn.Module,
    loader: EvaluationLoader,
    world: World,
    dtype: torch.dtype | None,
    most: float,
    new_rows: Callable[[int, int], Tensor],
) -> tuple[Tensor, list[Failure]]:
    """This rank's rows, and all ranks' images that could not be used."""
    rows = extract(backbone, loader, world.device, dtype, most, halved, new_rows)[0]
    return rows, [each for part in gather(loader.failures) for each in part]


def _features(images: int, ranks: int, parts: Mapping, failures: list[Failure], most: float) -> Features:
    left_out = count_left_out(failures, images, most)
    failed = np.unique(np.array([failure.image for failure in failures], np.int64))
    return Features(images, ranks, parts, failed, left_out)
