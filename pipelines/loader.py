"""Runs the graph and returns its output as torch tensors, without a copy.

Shapes: N images of this rank and micro-batch, S the side of a view. Views are [N, 3, S, S] in channels-last
memory, which is fastest for convolutions.
"""

import threading
import warnings
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch

from . import graph, photometric
from .background import in_background
from .batch import Batch
from .cpu_views import augment, one_thread_each
from .cutmix import CutMix, Mix, draw_mix
from .errors import DataError
from .loader_settings import (
    TIMEOUT,
    check_division,
    check_groups,
    check_rank,
    check_types,
    device_number,
    thread_count,
    too_few,
)
from .manifest import Manifest
from .order import batch_indices, begin_order
from .parameters import Parameters, sample
from .presets import Growth, View, preset_views
from .reading.apart import Apart
from .reading.damage import Damaged
from .reading.source import THREADS, Source
from .reading.supply import SILENT, Supply
from .stream import run_pipeline

MOST_AHEAD = 64  # largest number of batches to read ahead, however small the images are
SPARE = 4 << 20  # bytes for the images of a step beyond twice their mean size
INPUTS_AHEAD = 2  # batches whose parameters a thread prepares for a GPU's pipeline


@dataclass(frozen=True)
class _Drawn:
    """The views of a step, the parameters of its images for each view, and how the views are mixed."""

    views: tuple[View, ...]
    parameters: list[Parameters]
    mix: Mix | None


class Loader:
    """Makes batches of augmented views; any step can be made without the steps before it.

    The content of a step depends only on the manifest, the preset, `batch_size`, `accumulation_steps` and `seed`,
    not on the number of ranks (each takes its slice), threads or prefetching. An image that cannot be read or
    decoded, or does not answer in time, is replaced by another one; the rest of the batch stays the same.

    Args:
        manifest: the images.
        preset: a preset's name (None is "simsiam"), or the views themselves, the two global ones first.
        batch_size: images of one optimizer step, over all ranks and accumulation steps.
        seed: seed of order and augmentation.
        rank, world_size: which slice of each micro-batch to make.
        device: device that decodes and augments: "cpu", "gpu" (the current GPU), or a torch device.
        image_size: side of the global views, pixels; used with a preset's name, None is the preset's.
        accumulation_steps: micro-batches per optimizer step.
        threads: CPU threads; None means one less than the cores of this rank, at least one.
        prefetch: batches made ahead.
        cutmix: how to mix the two global views; None mixes nothing.
        photometric: "dali" recolours by one affine map per image; "torch" by torchvision's operations one by
            one, as published code does, and more slowly.
        growth: smaller views in the first epochs; None is full size throughout.
        hw_decoder_load: share of the images for a GPU's JPEG unit.
        timeout: seconds after which a file that does not answer is replaced.
        outlasts: if neither an image nor its replacements can be read, repeat one of the batch and say so in
            `Batch.lost` instead of raising an error, so that the caller can end cleanly.
        read_threads: number of files to read at once.
        read_ahead: bytes of encoded images to read ahead, counted by their mean size; at least `prefetch` batches, and
            at most `MOST_AHEAD`.
        pinned: put views that the CPU makes into pinned memory, from which a GPU copies asynchronously.
        known: steps and images that failed earlier in the run, with the reasons; they are replaced again.
        recipe: the older name of `preset`.
        override: keyword arguments of `preset_views`, such as fields of `View` to replace in every view.

    Raises:
        DataError: the batch does not divide or there are too few images; while iterating, too many files in a
            row cannot be read.
    """

    def __init__(
        self,
        manifest: Manifest,
        preset: str | tuple[View, ...] | None = None,
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
        outlasts: bool = False,
        read_threads: int = THREADS,
        read_ahead: int = 0,
        pinned: bool = False,
        known: Mapping[tuple[int, int], str] | None = None,
        recipe: str | tuple[View, ...] | None = None,
        **override: Any,
    ) -> None:
        if recipe is not None:
            warnings.warn("Loader(recipe=...) is now Loader(preset=...)", FutureWarning, stacklevel=2)
            if preset is not None and preset != recipe:
                raise DataError(
                    f"recipe {recipe!r} and preset {preset!r} are both given; leave out recipe, the older name"
                )
            preset = recipe
        if preset is None:
            preset = "simsiam"
        if not isinstance(preset, str) and override:
            raise DataError(f"{', '.join(override)} cannot be combined with finished views; change the views instead")
        integers = {"batch_size": batch_size, "rank": rank, "world_size": world_size, "prefetch": prefetch}
        check_types(manifest, **integers, read_threads=read_threads, read_ahead=read_ahead)
        check_rank(rank, world_size)
        check_division(batch_size, accumulation_steps, world_size)
        if prefetch < 1:
            raise DataError(f"prefetch {prefetch} must be at least 1; use 2")
        if read_threads < 1:
            raise DataError(f"{read_threads} threads cannot read images; use at least 1")
        if photometric not in ("dali", "torch"):
            raise DataError(f"photometric {photometric!r} is unknown; use 'dali' or 'torch'")
        if not timeout > 0:
            raise DataError(f"a timeout of {timeout} s must be above 0; use {TIMEOUT:g}")
        if not 0 <= hw_decoder_load <= 1:
            raise DataError(f"hardware decoder load {hw_decoder_load} is not a share; use 0 to 1")
        if len(manifest) < batch_size:
            raise DataError(too_few(manifest, batch_size, accumulation_steps * world_size))
        self.manifest = manifest
        self.views = preset_views(preset, image_size, **override) if isinstance(preset, str) else tuple(preset)
        self.batch_size, self.accumulation_steps = batch_size, accumulation_steps
        self.share = batch_size // (accumulation_steps * world_size)
        if cutmix is not None:
            check_groups(cutmix, self.share, len(self.views))
        if growth is not None:
            growth.check(self.views)
        self.cutmix, self.growth, self.photometric = cutmix, growth, photometric
        self.seed, self.rank, self.world_size = seed, rank, world_size
        self.device_id = device_number(device)
        self.apart = self.device_id is not None and manifest.storage.on_disk  # read in another process
        self.hw_decoder_load = hw_decoder_load
        self.threads = thread_count(threads)
        self.prefetch, self.timeout, self.outlasts = prefetch, timeout, outlasts
        self.read_threads, self.pinned = read_threads, pinned
        self._batch_bytes = max(1, manifest.total_bytes // len(manifest) * self.share)
        self.ahead = max(prefetch, min(MOST_AHEAD, read_ahead // self._batch_bytes))
        self.known = dict(known or {})
        self.damaged = Damaged(manifest, self.threads)
        self.leave_out(self.known)
        self._open: weakref.WeakSet[_Iteration] = weakref.WeakSet()

    @property
    def steps_per_epoch(self) -> int:
        """Micro-batches per epoch; images that do not fill an optimizer step are left out of that epoch."""
        return len(self.manifest) // self.batch_size * self.accumulation_steps

    def iterate(self, start_step: int = 0, stop_step: int | None = None) -> Iterator[Batch]:
        """Micro-batches `start_step`, `start_step + 1`, ... before `stop_step`; endless if that is None.

        Raises:
            DataError: while iterating, if neither an image nor any of its replacements can be read.
        """
        if start_step < 0:
            raise DataError(f"start step {start_step} is negative; steps count from 0")
        batches = _Iteration(self._batches(start_step, stop_step))
        self._open.add(batches)
        return batches

    def close(self) -> None:
        """Ends every iteration of this loader and frees its pipelines; waits if another thread is making a batch."""
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
        """Skips images that did not answer, on any rank, from that step on, instead of waiting for them again."""
        for (step, image), why in failures.items():
            if why.startswith(SILENT):
                self.damaged.leave_out(image, step, why)

    def views_in(self, epoch: int) -> tuple[View, ...]:
        """The views of an epoch; smaller than `views` while they grow."""
        return self.views if self.growth is None else self.growth.views(self.views, epoch)

    def _batches(self, start_step: int, stop_step: int | None) -> Generator[Batch, None, None]:
        make = self._on_cpu if self.device_id is None else self._on_gpu
        with closing(make(start_step, stop_step)) as made:
            for supply, views in made:
                yield self._batch(supply, views)

    def _on_gpu(self, start: int, stop: int | None) -> Generator[tuple[Supply, list[torch.Tensor]], None, None]:
        """Supplies and their views, from a pipeline that prefetches by itself."""
        colours = self.photometric == "dali"
        build = partial(
            graph.build,
            self.views,
            self.share,
            threads=self.threads,
            device_id=self.device_id,
            prefetch=self.prefetch,
            hw_decoder_load=self.hw_decoder_load,
            colours=colours,
        )

        def feed(supply: Supply) -> list:
            drawn = supply.drawn = self._draw(supply)
            arrays = [graph.feed(view, p, colours) for view, p in zip(drawn.views, drawn.parameters, strict=True)]
            return [supply.data, *(array for part in arrays for array in part)]

        with closing(self._source(stop)) as source:
            for supply, outputs in run_pipeline(source, build, feed, self.device_id, start, INPUTS_AHEAD):
                made = [torch.from_dlpack(output.as_tensor()) for output in outputs]
                if colours:
                    yield supply, [output.permute(0, 3, 1, 2) for output in made]
                else:
                    named = zip(supply.drawn.views, supply.drawn.parameters, made, strict=True)
                    yield supply, [photometric.apply(view, crop, p) for view, p, crop in named]

    def _on_cpu(self, start: int, stop: int | None) -> Generator[tuple[Supply, list[torch.Tensor]], None, None]:
        """Supplies and their views, from a decoding pipeline and threads that crop and recolour, in the background."""
        build = partial(
            graph.build_decoder, batch_size=self.share, threads=self.threads, prefetch=min(2, self.prefetch)
        )

        def work(stopped: Callable[[], bool]) -> Generator[tuple[Supply, list[torch.Tensor]], None, None]:
            with closing(self._source(stop, stopped)) as source, one_thread_each(self.threads) as pool:
                for supply, (images,) in run_pipeline(source, build, lambda supply: [supply.data], None, start):
                    decoded = [torch.from_dlpack(image) for image in images]
                    drawn = supply.drawn = self._draw(supply)
                    exact = self.photometric == "torch"
                    yield supply, augment(decoded, drawn.views, drawn.parameters, exact, pool, self.pinned)

        return in_background(work, self.prefetch)

    def _draw(self, supply: Supply) -> "_Drawn":
        """The random parameters of a step, which belong to the images of the order, not to their replacements."""
        views, sizes = self.views_in(supply.epoch), self.manifest.sizes[supply.index]
        mix = None
        if self.cutmix is not None:
            mix = draw_mix(self.cutmix, self.seed, supply.step, self.rank * self.share, self.share, views[0].size)
        parameters = [
            sample(view, number, self.seed, supply.epoch, supply.asked, sizes) for number, view in enumerate(views)
        ]
        return _Drawn(views, parameters, mix)

    def _source(self, stop: int | None, stopped: Callable[[], bool] = lambda: False) -> Source:
        latest = -1  # last epoch for which the next order is being computed

        def indices(step: int) -> tuple[int, np.ndarray]:
            nonlocal latest
            epoch, images = self.indices(step)
            if epoch > latest:
                latest = epoch
                if stop is None or stop > (epoch + 1) * self.steps_per_epoch:
                    begin_order(self.seed, epoch + 1, len(self.manifest))
            return epoch, images

        return Source(
            self.manifest,
            indices,
            last=stop,
            ahead=self.ahead,
            timeout=self.timeout,
            seed=self.seed,
            known=self.known,
            damaged=self.damaged,
            stopped=stopped,
            outlasts=self.outlasts,
            threads=self.read_threads,
            apart=self._reader() if self.apart else None,
        )

    def _reader(self) -> Apart:
        """A process that reads, with memory for steps twice as large as the mean, and more if they are small."""
        steps = self.ahead + 1 + INPUTS_AHEAD + 1 + self.prefetch
        return Apart(self.read_threads, self.timeout, steps, 2 * self._batch_bytes + SPARE)

    def _batch(self, supply: Supply, views: list[torch.Tensor]) -> Batch:
        index = torch.from_numpy(supply.index)
        labels = self.manifest.labels
        mix = supply.drawn.mix
        return Batch(
            views=views,
            index=index,
            label=torch.full_like(index, -1) if labels is None else torch.from_numpy(labels[supply.index]),
            step=supply.step,
            replaced=torch.from_numpy(supply.replaced),
            mix=None if mix is None else mix.to(views[0].device),
            failures=supply.failures,
            lost=supply.lost,
        )


class _Iteration(Iterator[Batch]):
    """A generator of batches that one thread may close while another waits for a batch."""

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
