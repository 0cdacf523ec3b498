"""Runs the graph and hands its output over as torch tensors, without a copy.

Shapes: N images of this rank and micro-batch, S the side of a view. Views are [N, 3, S, S] in channels-last
memory, which is what the graph writes and what convolutions like best.
"""

import os
import re
import weakref
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError

from . import graph
from .cutmix import CutMix, Mix, draw
from .errors import DataError
from .manifest import Manifest, reason
from .order import batch_indices
from .parameters import sample
from .recipes import View
from .recipes import recipe as make_recipe

if TYPE_CHECKING:
    from nvidia.dali.pipeline import Pipeline


@dataclass
class Batch:
    """One micro-batch of one rank.

    Attributes:
        views: fp32 [N, 3, S, S] each, channels-last, normalised, on the loader's device.
        index: int64 [N], positions in the manifest.
        label: int64 [N], -1 where the manifest has no labels.
        step: micro-batches since the start of the run.
        replaced: bool [N], images that stand in for a file that could not be read.
        mix: how the global views are to be mixed (`mix.apply(views[:2])`); None without CutMix.
    """

    views: list[torch.Tensor]
    index: torch.Tensor
    label: torch.Tensor
    step: int
    replaced: torch.Tensor
    mix: Mix | None = None


class Loader:
    """Batches of augmented views, any step of which can be made without those before it.

    What a step holds depends on the manifest, the recipe, `batch_size`, `accumulation_steps` and `seed`
    alone: neither on the number of ranks (each takes its slice) nor on threads or prefetching.

    Args:
        manifest: the images.
        recipe: a preset's name, or the views themselves.
        batch_size: images of one optimizer step, over all ranks and accumulation steps.
        seed: of order and augmentation.
        rank, world_size: which slice of each micro-batch is made here.
        device: where to decode and augment: "cpu", "gpu" (the current one), or a torch device.
        image_size: side of the global views, pixels; used with a preset's name, None is the preset's.
        accumulation_steps: micro-batches per optimizer step.
        threads: CPU threads; None for the cores of this rank less one, at least one.
        prefetch: batches made ahead.
        cutmix: how to mix the two global views; None mixes nothing.
        override: keywords of `recipe`, such as fields of `View` to replace in every view.

    Raises:
        DataError: the batch does not divide, there are too few images, a file cannot be read.
    """

    def __init__(
        self,
        manifest: Manifest,
        recipe: str | tuple[View, ...] = "simsiam",
        batch_size: int = 64,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        device: str | torch.device = "cpu",
        *,
        image_size: int | None = None,
        accumulation_steps: int = 1,
        threads: int | None = None,
        prefetch: int = 2,
        cutmix: CutMix | None = None,
        **override: Any,
    ) -> None:
        if not isinstance(recipe, str) and override:
            raise DataError(f"{', '.join(override)} given beside finished views; change the views instead")
        _check_rank(rank, world_size)
        _check_division(batch_size, accumulation_steps, world_size)
        if prefetch < 1:
            raise DataError(f"prefetch {prefetch} leaves no batch in the making; use 2, or at least 1")
        if len(manifest) < batch_size:
            raise DataError(_too_few(manifest, batch_size, accumulation_steps * world_size))
        manifest.require_readable()
        self.manifest = manifest
        self.views = make_recipe(recipe, image_size, **override) if isinstance(recipe, str) else tuple(recipe)
        self.batch_size, self.accumulation_steps = batch_size, accumulation_steps
        self.share = batch_size // (accumulation_steps * world_size)
        if cutmix is not None:
            _check_groups(cutmix, self.share, len(self.views))
        self.cutmix = cutmix
        self.seed, self.rank, self.world_size = seed, rank, world_size
        self.device_id = _device_id(device)
        self.threads = _threads(threads)
        self.prefetch = prefetch
        self._open: weakref.WeakSet[Generator] = weakref.WeakSet()

    @property
    def steps_per_epoch(self) -> int:
        """Micro-batches per epoch; images that do not fill an optimizer step are left for another epoch."""
        return len(self.manifest) // self.batch_size * self.accumulation_steps

    def iterate(self, start_step: int = 0, stop_step: int | None = None) -> Iterator[Batch]:
        """Micro-batches `start_step`, `start_step + 1`, ... up to but without `stop_step`; endless if None.

        Raises:
            DataError: while iterating, if a file cannot be decoded; it names the file and the reason.
        """
        if start_step < 0:
            raise DataError(f"start step {start_step} is negative; steps count from 0")
        batches = self._batches(start_step, stop_step)
        self._open.add(batches)
        return batches

    def close(self) -> None:
        """Ends every iteration of this loader and frees its pipelines."""
        for batches in list(self._open):
            batches.close()

    def indices(self, step: int) -> tuple[int, np.ndarray]:
        """The epoch of a micro-batch step and this rank's images in it, int64 [N]."""
        return batch_indices(
            self.seed,
            step,
            len(self.manifest),
            self.batch_size,
            self.accumulation_steps,
            self.rank,
            self.world_size,
        )

    def _batches(self, start_step: int, stop_step: int | None) -> Generator[Batch, None, None]:
        def source(info: Any) -> list:
            step = start_step + info.iteration
            if stop_step is not None and step >= stop_step:
                raise StopIteration
            return self._feed(*self.indices(step))

        if stop_step is not None and stop_step <= start_step:
            return
        pipeline = graph.build(
            self.views,
            self.share,
            source,
            threads=self.threads,
            device_id=self.device_id,
            prefetch=self.prefetch,
        )
        step = start_step
        while stop_step is None or step < stop_step:
            try:
                views = _run(pipeline, self.device_id)
            except RuntimeError as error:
                # With prefetching the failure may belong to a batch ahead of the one asked for.
                ahead = range(step, min(step + self.prefetch + 1, stop_step or step + self.prefetch + 1))
                index = np.concatenate([self.indices(s)[1] for s in ahead])
                raise _culprit(self.manifest, index, self.device_id) or error from error
            yield self._batch(views, step)
            step += 1

    def _feed(self, epoch: int, index: np.ndarray) -> list:
        sizes = self.manifest.sizes[index]
        arrays = [_paths(self.manifest, index)]
        for number, view in enumerate(self.views):
            arrays += graph.feed(view, sample(view, number, self.seed, epoch, index, sizes))
        return arrays

    def _batch(self, views: list[torch.Tensor], step: int) -> Batch:
        index = torch.tensor(self.indices(step)[1])
        labels = self.manifest.labels
        mix = None
        if self.cutmix is not None:
            mix = draw(self.cutmix, self.seed, step, self.rank * self.share, self.share, self.views[0].size)
            mix = mix.to(views[0].device)
        return Batch(
            views=views,
            index=index,
            label=torch.full_like(index, -1) if labels is None else torch.from_numpy(labels[index.numpy()]),
            step=step,
            replaced=torch.zeros(len(index), dtype=torch.bool),
            mix=mix,
        )


class EvaluationLoader:
    """Every image of a rank's share exactly once, resized and centrally cropped as torchvision would.

    Iterating gives (images fp32 [N, 3, S, S] channels-last and normalised, index int64 [N] in the manifest);
    rank r takes the images r, r + world_size, ...; the last batch may be short. It can be iterated again.

    Args:
        manifest: the images.
        image_size: side of the crop, pixels.
        crop_fraction: side of the crop as a share of the resized image's short side.
        batch_size: images per batch on this rank.
        rank, world_size: which share of the images is taken here.
        device, threads: as in `Loader`.

    Raises:
        DataError: a file cannot be read; it names the file and the reason.
    """

    def __init__(
        self,
        manifest: Manifest,
        image_size: int,
        crop_fraction: float = 0.875,
        batch_size: int = 256,
        rank: int = 0,
        world_size: int = 1,
        device: str | torch.device = "cpu",
        threads: int | None = None,
    ) -> None:
        if not 0 < crop_fraction <= 1:
            raise DataError(f"crop fraction {crop_fraction} is out of range; use 0.875, or up to 1")
        _check_rank(rank, world_size)
        manifest.require_readable()
        self.manifest, self.image_size = manifest, image_size
        self.short_side = round(image_size / crop_fraction)
        self.index = np.arange(rank, len(manifest), world_size)
        self.batch_size = min(batch_size, max(1, len(self.index)))
        self.device_id, self.threads = _device_id(device), _threads(threads)

    def __len__(self) -> int:
        return -(-len(self.index) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        def source(info: Any) -> list:
            if info.iteration >= len(self):
                raise StopIteration
            index = self._part(info.iteration)
            return [_paths(self.manifest, index), *self._geometry(self.manifest.sizes[index])]

        if not len(self):
            return
        pipeline = graph.build_evaluation(
            self.image_size, self.batch_size, source, threads=self.threads, device_id=self.device_id
        )
        for number in range(len(self)):
            try:
                (images,) = _run(pipeline, self.device_id)
            except RuntimeError as error:
                index = self.index[number * self.batch_size : (number + 3) * self.batch_size]
                raise _culprit(self.manifest, index, self.device_id) or error from error
            yield images, torch.from_numpy(self._part(number))

    def _part(self, number: int) -> np.ndarray:
        return self.index[number * self.batch_size : (number + 1) * self.batch_size]

    def _geometry(self, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Height and width after resizing, and where the crop starts: torchvision's roundings."""
        short = sizes.min(axis=1, keepdims=True)
        resized = np.maximum(self.short_side * sizes.astype(np.int64) // short, self.image_size)[:, ::-1]
        start = np.rint((resized - self.image_size) / 2)
        return resized.astype(np.float32), start.astype(np.int32)


def _run(pipeline: "Pipeline", device_id: int | None) -> list[torch.Tensor]:
    """One batch: the pipeline's outputs as channels-last tensors [N, 3, S, S] on the same memory."""
    stream = None if device_id is None else torch.cuda.current_stream(device_id)
    outputs = pipeline.run(stream)
    return [torch.from_dlpack(output.as_tensor()).permute(0, 3, 1, 2) for output in outputs]


def _paths(manifest: Manifest, index: np.ndarray) -> list[np.ndarray]:
    return [np.frombuffer(manifest.path_bytes(i), np.uint8) for i in index.tolist()]


def _culprit(manifest: Manifest, index: np.ndarray, device_id: int | None) -> DataError | None:
    """The first of these images that cannot be decoded, as an error that says why; None if all can."""
    pipeline = graph.build_decoder(lambda info: [_paths(manifest, index[[info.iteration]])], device_id)
    for image in index.tolist():
        why = _defect(manifest, image, pipeline)
        if why:
            return DataError(f"{manifest.path(image)}: {why}; repair or remove the file")
    return None


def _defect(manifest: Manifest, image: int, pipeline: "Pipeline") -> str | None:
    """Why an image, the next one of the pipeline, cannot be used; None if it can."""
    path = manifest.path_bytes(image)
    try:
        if not os.stat(path).st_size:
            return "the file is empty"
        with open(path, "rb"):
            pass
        (decoded,) = pipeline.run()
    except OSError as error:
        return f"the file cannot be opened: {reason(error)}"
    except RuntimeError as error:
        return f"the image cannot be decoded: {_diagnosis(path) or _summary(str(error))}"
    height, width, _ = decoded[0].shape()
    if (width, height) != tuple(manifest.sizes[image]):
        expected = "x".join(map(str, manifest.sizes[image]))
        return f"the image is {width}x{height} now and was {expected} when the folder was listed"
    return None


def _diagnosis(path: bytes) -> str | None:
    """What Pillow finds wrong with an image, which it says more clearly than the decoder; None if nothing."""
    try:
        with open(path, "rb") as file, Image.open(file) as image:
            image.load()
    except UnidentifiedImageError:
        return "it is not an image, or its header is damaged"
    except (OSError, SyntaxError, ValueError) as error:
        return str(error)
    return None


def _summary(message: str) -> str:
    """What DALI's decoder says, without the trace around it."""
    said = message.partition("encountered:")[2].strip() or message.strip()
    return re.sub(r"^\[[^]]*\]\s*|^Error\S*:\s*", "", said.splitlines()[0])


def _device_id(device: str | torch.device) -> int | None:
    device = torch.device("cuda" if device == "gpu" else device)
    if device.type == "cpu":
        return None
    if device.type != "cuda":
        raise DataError(f"device {device} cannot decode images; use cpu or cuda")
    return torch.cuda.current_device() if device.index is None else device.index


def _threads(threads: int | None) -> int:
    if threads is not None:
        if threads < 1:
            raise DataError(f"{threads} threads cannot decode images; use at least 1")
        return threads
    cores = os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    # The machine's cores are shared by its ranks, unless the launcher already gave each rank cores of its own.
    return max(1, min(allowed, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1))) - 1)


def _check_rank(rank: int, world_size: int) -> None:
    if not 0 <= rank < world_size:
        raise DataError(f"rank {rank} of {world_size} ranks does not exist; use 0 to {world_size - 1}")


def _check_division(batch_size: int, accumulation_steps: int, world_size: int) -> None:
    parts = accumulation_steps * world_size
    if batch_size > 0 and batch_size % parts == 0:
        return
    low = batch_size // parts * parts
    nearest = f"{low} or {low + parts}" if low > 0 else str(parts)
    over = f"{world_size} ranks" + (f" and {accumulation_steps} accumulation steps" if accumulation_steps > 1 else "")
    raise DataError(f"batch size {batch_size} does not divide over {over}; use {nearest}")


def _check_groups(cutmix: CutMix, share: int, views: int) -> None:
    if views < 2:
        raise DataError(f"CutMix mixes the two global views, and the recipe has {views}; take a recipe of two or more")
    if share % cutmix.group:
        fitting = [group for group in range(2, share + 1) if share % group == 0 and group <= cutmix.group]
        remedy = f"use {fitting[-1]}" if fitting else f"use more than {share} image{'s' if share > 1 else ''} per rank"
        raise DataError(f"a CutMix group of {cutmix.group} does not divide the {share} images per rank; {remedy}")


def _too_few(manifest: Manifest, batch_size: int, parts: int) -> str:
    count = len(manifest)
    found = f"{manifest.root}: {count} image{'s' if count > 1 else ''} cannot fill a batch of {batch_size}"
    largest = count // parts * parts
    remedy = f"a batch size of {largest} or less, or" if largest else ""
    return f"{found}; use {remedy} at least {batch_size} images".replace("  ", " ")
