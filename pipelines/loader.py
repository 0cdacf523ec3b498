"""Runs the graph and hands its output over as torch tensors, without a copy.

Shapes: N images of this rank and micro-batch, S the side of a view. Views are [N, 3, S, S] in channels-last
memory, which is what convolutions like best.
"""

import os
import threading
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from . import crops, graph, photometric
from .background import in_background, one_thread_each
from .cutmix import CutMix, Mix, draw
from .damage import Damaged
from .errors import DataError
from .manifest import Manifest
from .order import batch_indices
from .parameters import Parameters, sample
from .reading import SILENT, Failure, Source, Supply
from .recipes import Growth, View
from .recipes import recipe as make_recipe
from .stream import Stream

if TYPE_CHECKING:
    from nvidia.dali.pipeline import Pipeline

CHUNK = 8  # images that a thread crops and recolours at once
TIMEOUT = 60.0  # seconds
LONG = 4  # times the short side: what is longer is not resized as a whole


@dataclass
class Batch:
    """One micro-batch of one rank.

    Attributes:
        views: fp32 [N, 3, S, S] each, channels-last, normalised, on the loader's device.
        index: int64 [N], positions in the manifest.
        label: int64 [N], -1 where the manifest has no labels.
        step: micro-batches since the start of the run.
        replaced: bool [N], images that stand in for one that could not be used.
        mix: how the global views are to be mixed (`mix.apply(views[:2])`); None without CutMix.
        failures: the images that could not be used, and why.
    """

    views: list[torch.Tensor]
    index: torch.Tensor
    label: torch.Tensor
    step: int
    replaced: torch.Tensor
    mix: Mix | None = None
    failures: list[Failure] = field(default_factory=list)


class Loader:
    """Batches of augmented views, any step of which can be made without those before it.

    What a step holds depends on the manifest, the recipe, `batch_size`, `accumulation_steps` and `seed`
    alone: neither on the number of ranks (each takes its slice) nor on threads or prefetching. An image that
    cannot be read or decoded, or does not answer in time, is replaced by another one; the rest of the batch
    is as it would have been.

    Args:
        manifest: the images.
        recipe: a preset's name, or the views themselves, the two global ones first.
        batch_size: images of one optimizer step, over all ranks and accumulation steps.
        seed: of order and augmentation.
        rank, world_size: which slice of each micro-batch is made here.
        device: where to decode and augment: "cpu", "gpu" (the current one), or a torch device.
        image_size: side of the global views, pixels; used with a preset's name, None is the preset's.
        accumulation_steps: micro-batches per optimizer step.
        threads: CPU threads; None for the cores of this rank less one, at least one.
        prefetch: batches made ahead.
        cutmix: how to mix the two global views; None mixes nothing.
        photometric: "dali" recolours by one affine map per image; "torch" by torchvision's operations one by
            one, as published code does, and more slowly.
        growth: smaller views in the first epochs; None is full size throughout.
        hw_decoder_load: share of the images for a GPU's JPEG unit.
        timeout: seconds after which a file that does not answer is replaced.
        known: steps and images that failed when the run made them before, and why: they are replaced again.
        override: keywords of `recipe`, such as fields of `View` to replace in every view.

    Raises:
        DataError: the batch does not divide, there are too few images; while iterating, too many files in a
            row cannot be read.
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
        photometric: Literal["dali", "torch"] = "dali",
        growth: Growth | None = None,
        hw_decoder_load: float = graph.HW_DECODER_LOAD,
        timeout: float = TIMEOUT,
        known: Mapping[tuple[int, int], str] | None = None,
        **override: Any,
    ) -> None:
        if not isinstance(recipe, str) and override:
            raise DataError(f"{', '.join(override)} given beside finished views; change the views instead")
        _check_rank(rank, world_size)
        _check_division(batch_size, accumulation_steps, world_size)
        if prefetch < 1:
            raise DataError(f"prefetch {prefetch} leaves no batch in the making; use 2, or at least 1")
        if photometric not in ("dali", "torch"):
            raise DataError(f"photometric {photometric!r} is unknown; use 'dali' or 'torch'")
        if not timeout > 0:
            raise DataError(f"a timeout of {timeout} s gives no file a chance; use {TIMEOUT:g}, or more than 0")
        if not 0 <= hw_decoder_load <= 1:
            raise DataError(f"a hardware decoder load of {hw_decoder_load} is no share; use 0 to 1")
        if len(manifest) < batch_size:
            raise DataError(_too_few(manifest, batch_size, accumulation_steps * world_size))
        self.manifest = manifest
        self.views = make_recipe(recipe, image_size, **override) if isinstance(recipe, str) else tuple(recipe)
        self.batch_size, self.accumulation_steps = batch_size, accumulation_steps
        self.share = batch_size // (accumulation_steps * world_size)
        if cutmix is not None:
            _check_groups(cutmix, self.share, len(self.views))
        if growth is not None:
            growth.check(self.views)
        self.cutmix, self.growth, self.photometric = cutmix, growth, photometric
        self.seed, self.rank, self.world_size = seed, rank, world_size
        self.device_id = _device_id(device)
        self.hw_decoder_load = hw_decoder_load
        self.threads = _threads(threads)
        self.prefetch, self.timeout = prefetch, timeout
        self.known = dict(known or {})
        self.damaged = Damaged(manifest)
        self.leave_out(self.known)
        self._open: weakref.WeakSet[_Iteration] = weakref.WeakSet()

    @property
    def steps_per_epoch(self) -> int:
        """Micro-batches per epoch; images that do not fill an optimizer step are left for another epoch."""
        return len(self.manifest) // self.batch_size * self.accumulation_steps

    def iterate(self, start_step: int = 0, stop_step: int | None = None) -> Iterator[Batch]:
        """Micro-batches `start_step`, `start_step + 1`, ... up to but without `stop_step`; endless if None.

        Raises:
            DataError: while iterating, if an image and all that could take its place cannot be read.
        """
        if start_step < 0:
            raise DataError(f"start step {start_step} is negative; steps count from 0")
        batches = _Iteration(self._batches(start_step, stop_step))
        self._open.add(batches)
        return batches

    def close(self) -> None:
        """Ends every iteration of this loader and frees its pipelines; waits for a batch that another thread is at."""
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

    def leave_out(self, failures: Mapping[tuple[int, int], str]) -> None:
        """From a step on, does not wait again for an image that did not answer then, on whichever rank that was."""
        for (step, image), why in failures.items():
            if why.startswith(SILENT):
                self.damaged.leave_out(image, step, why)

    def views_in(self, epoch: int) -> tuple[View, ...]:
        """The views of an epoch, smaller than `views` while they grow."""
        return self.views if self.growth is None else self.growth.views(self.views, epoch)

    def _batches(self, start_step: int, stop_step: int | None) -> Generator[Batch, None, None]:
        make = self._on_cpu if self.device_id is None else self._on_gpu
        with closing(make(start_step, stop_step)) as made:
            for supply, views in made:
                yield self._batch(supply, views)

    def _on_gpu(self, start: int, stop: int | None) -> Generator[tuple[Supply, list[torch.Tensor]], None, None]:
        """Supplies and their views, from a pipeline that works ahead by itself."""
        colours = self.photometric == "dali"

        def build(source: Callable[[Any], list]) -> "Pipeline":
            return graph.build(
                self.views,
                self.share,
                source,
                threads=self.threads,
                device_id=self.device_id,
                prefetch=self.prefetch,
                hw_decoder_load=self.hw_decoder_load,
                colours=colours,
            )

        def feed(supply: Supply) -> list:
            views, parameters = self._parameters(supply)
            arrays = [graph.feed(view, p, colours) for view, p in zip(views, parameters, strict=True)]
            return [supply.data, *(array for part in arrays for array in part)]

        with closing(self._source(stop)) as source:
            for supply, outputs in Stream(source, build, feed, self.device_id).steps(start):
                made = [torch.from_dlpack(output.as_tensor()) for output in outputs]
                if colours:
                    yield supply, [output.permute(0, 3, 1, 2) for output in made]
                else:
                    named = zip(*self._parameters(supply), made, strict=True)
                    yield supply, [photometric.apply(view, crop, p) for view, p, crop in named]

    def _on_cpu(self, start: int, stop: int | None) -> Generator[tuple[Supply, list[torch.Tensor]], None, None]:
        """The same, from a decoding pipeline and threads that crop and recolour, all of it in the background."""

        def build(source: Callable[[Any], list]) -> "Pipeline":
            return graph.build_decoder(
                source, batch_size=self.share, threads=self.threads, prefetch=min(2, self.prefetch)
            )

        def work(stopped: Callable[[], bool]) -> Generator[tuple[Supply, list[torch.Tensor]], None, None]:
            with closing(self._source(stop, stopped)) as source, one_thread_each(self.threads) as pool:
                for supply, (images,) in Stream(source, build, lambda supply: [supply.data], None).steps(start):
                    yield supply, self._augment(supply, [torch.from_dlpack(image) for image in images], pool)

        return in_background(work, self.prefetch)

    def _augment(self, supply: Supply, images: list[torch.Tensor], pool: ThreadPoolExecutor) -> list[torch.Tensor]:
        """Views of decoded images, on the CPU."""
        views, parameters = self._parameters(supply)
        outputs = [torch.empty(len(images), view.size, view.size, 3) for view in views]

        def some(first: int) -> None:
            part = slice(first, first + CHUNK)
            for view, whole, output in zip(views, parameters, outputs, strict=True):
                p = whole[part]
                crop = torch.empty(output[part].shape, dtype=torch.uint8)
                crops.crop_and_resize(images[part], view, p, crop)
                if self.photometric == "dali":
                    crops.recolour(view, crop, p, output[part])
                else:
                    flipped = replace(p, flip=np.zeros_like(p.flip))  # already
                    output[part] = photometric.apply(view, crop, flipped).permute(0, 2, 3, 1)

        list(pool.map(some, range(0, len(images), CHUNK)))
        return [output.permute(0, 3, 1, 2) for output in outputs]

    def _parameters(self, supply: Supply) -> tuple[tuple[View, ...], list[Parameters]]:
        """The views and their parameters; the randomness belongs to the images that were asked for."""
        views, sizes = self.views_in(supply.epoch), self.manifest.sizes[supply.index]
        return views, [
            sample(view, number, self.seed, supply.epoch, supply.asked, sizes) for number, view in enumerate(views)
        ]

    def _source(self, stop: int | None, stopped: Callable[[], bool] = lambda: False) -> Source:
        return Source(
            self.manifest,
            self.indices,
            last=stop,
            ahead=self.prefetch,
            timeout=self.timeout,
            seed=self.seed,
            known=self.known,
            damaged=self.damaged,
            stopped=stopped,
        )

    def _batch(self, supply: Supply, views: list[torch.Tensor]) -> Batch:
        index = torch.from_numpy(supply.index)
        labels = self.manifest.labels
        mix = None
        if self.cutmix is not None:
            size = views[0].shape[-1]
            mix = draw(self.cutmix, self.seed, supply.step, self.rank * self.share, self.share, size)
            mix = mix.to(views[0].device)
        return Batch(
            views=views,
            index=index,
            label=torch.full_like(index, -1) if labels is None else torch.from_numpy(labels[supply.index]),
            step=supply.step,
            replaced=torch.from_numpy(supply.replaced),
            mix=mix,
            failures=supply.failures,
        )


class _Iteration(Iterator[Batch]):
    """A generator of batches that one thread may close while another one waits for a batch."""

    def __init__(self, batches: Generator[Batch, None, None]) -> None:
        self._batches, self._ended, self._lock = batches, False, threading.RLock()

    def __next__(self) -> Batch:
        with self._lock:
            if self._ended:
                raise StopIteration
            return next(self._batches)

    def close(self) -> None:
        self._ended = True
        with self._lock:
            self._batches.close()


class EvaluationLoader:
    """Every image of a rank's share exactly once, resized and centrally cropped as torchvision would.

    Iterating gives (images fp32 [N, 3, S, S] channels-last and normalised, index int64 [N] in the manifest);
    rank r takes the images r, r + world_size, ...; the last batch may be short, and so is one with an image
    that cannot be used, which is left out and added to `failures`. It can be iterated again.

    Args:
        manifest: the images.
        image_size: side of the crop, pixels.
        crop_fraction: side of the crop as a share of the resized image's short side.
        batch_size: images per batch on this rank.
        rank, world_size: which share of the images is taken here.
        device, threads, timeout: as in `Loader`.
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
        timeout: float = TIMEOUT,
    ) -> None:
        if not 0 < crop_fraction <= 1:
            raise DataError(f"crop fraction {crop_fraction} is out of range; use 0.875, or up to 1")
        _check_rank(rank, world_size)
        self.manifest, self.image_size = manifest, image_size
        self.short_side = round(image_size / crop_fraction)
        self.index = np.arange(rank, len(manifest), world_size)
        self.batch_size = min(batch_size, max(1, len(self.index)))
        self.device_id, self.threads, self.timeout = _device_id(device), _threads(threads), timeout
        self.damaged = Damaged(manifest)
        self.failures: list[Failure] = []

    def __len__(self) -> int:
        return -(-len(self.index) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        def build(source: Callable[[Any], list]) -> "Pipeline":
            return graph.build_evaluation(
                self.image_size, self.batch_size, source, threads=self.threads, device_id=self.device_id
            )

        def feed(supply: Supply) -> list:
            return [supply.data, *self._geometry(np.maximum(1, self.manifest.sizes[supply.index]))]

        self.failures = []
        source = Source(
            self.manifest,
            lambda number: (0, self._part(number)),
            last=len(self),
            ahead=2,
            timeout=self.timeout,
            seed=None,
            known={},
            damaged=self.damaged,
        )
        with closing(source):
            for supply, (images,) in Stream(source, build, feed, self.device_id).steps(0):
                self.failures += supply.failures
                images, index = (
                    torch.from_dlpack(images.as_tensor()).permute(0, 3, 1, 2),
                    torch.from_numpy(supply.index),
                )
                if supply.failures:
                    found = index >= 0
                    images, index = images[found.to(images.device)], index[found]
                if len(index):
                    yield images, index

    def _part(self, number: int) -> np.ndarray:
        return self.index[number * self.batch_size : (number + 1) * self.batch_size]

    def _geometry(self, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """The arrays that `graph.build_evaluation` reads, with torchvision's roundings.

        Of long images only the crop is resized: all of a line of 5000 pixels would have 1.3 million by 256.
        """
        short = sizes.min(axis=1, keepdims=True)
        resized = np.maximum(self.short_side * sizes.astype(np.int64) // short, self.image_size)[:, ::-1]
        start = np.rint((resized - self.image_size) / 2)
        long = sizes.max(axis=1, keepdims=True) > LONG * short
        begin, end = np.where(long, start / resized, 0), np.where(long, (start + self.image_size) / resized, 1)
        size, start = np.where(long, self.image_size, resized), np.where(long, 0, start)
        return begin.astype(np.float32), end.astype(np.float32), size.astype(np.float32), start.astype(np.int32)


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
