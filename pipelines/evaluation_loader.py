"""Loads every image once, resized and centrally cropped, to evaluate an encoder."""

from collections.abc import Iterator
from contextlib import closing
from functools import partial

import numpy as np
import torch

from . import graph
from .loader_settings import TIMEOUT, check_rank, device_number, thread_count
from .manifest import Manifest
from .presets import short_side
from .reading.damage import Damaged
from .reading.source import THREADS, Source
from .reading.supply import Failure, Supply
from .stream import run_pipeline

LONG = 4  # times the short side: longer images are not resized as a whole


class EvaluationLoader:
    """Loads every image of a rank's share exactly once, resized and centrally cropped as by torchvision.

    Iterating gives (images fp32 [N, 3, S, S] channels-last and normalised, index int64 [N] in the manifest);
    rank r takes the images r, r + world_size, ...; the last batch may be short. Images that cannot be used are left
    out of their batch and added to `failures`. The loader can be iterated again.

    Args:
        manifest: the images.
        image_size: side of the crop, pixels.
        crop_fraction: side of the crop as a share of the resized image's short side.
        batch_size: images per batch on this rank.
        rank, world_size: which share of the images to load.
        device, threads, timeout, read_threads: as in `Loader`.
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
        read_threads: int = THREADS,
    ) -> None:
        check_rank(rank, world_size)
        self.manifest, self.image_size = manifest, image_size
        self.short_side = short_side(image_size, crop_fraction)
        self.index = np.arange(rank, len(manifest), world_size)
        self.batch_size = min(batch_size, max(1, len(self.index)))
        self.device_id, self.threads, self.timeout = device_number(device), thread_count(threads), timeout
        self.read_threads, self.damaged = read_threads, Damaged(manifest, self.threads)
        self.failures: list[Failure] = []

    def __len__(self) -> int:
        return -(-len(self.index) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        build = partial(
            graph.build_evaluation, self.image_size, self.batch_size, threads=self.threads, device_id=self.device_id
        )

        def feed(supply: Supply) -> list:
            return [supply.data, *self._geometry(np.maximum(1, self.manifest.sizes[supply.index]))]

        self.failures = []
        source = Source(
            self.manifest,
            lambda number: (0, self.index[number * self.batch_size : (number + 1) * self.batch_size]),
            last=len(self),
            ahead=2,
            timeout=self.timeout,
            damaged=self.damaged,
            threads=self.read_threads,
        )
        with closing(source):
            for supply, (images,) in run_pipeline(source, build, feed, self.device_id):
                self.failures += supply.failures
                images = torch.from_dlpack(images.as_tensor()).permute(0, 3, 1, 2)
                index = torch.from_numpy(supply.index)
                if supply.failures:
                    found = index >= 0
                    images, index = images[found.to(images.device)], index[found]
                if len(index):
                    yield images, index

    def _geometry(self, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """The arrays that `graph.build_evaluation` reads, with torchvision's roundings.

        For long images only the crop is resized: a row of 5000 pixels would otherwise become 1.3 million by 256.
        """
        short = sizes.min(axis=1, keepdims=True)
        resized = np.maximum(self.short_side * sizes.astype(np.int64) // short, self.image_size)[:, ::-1]
        start = np.rint((resized - self.image_size) / 2)
        long = sizes.max(axis=1, keepdims=True) > LONG * short
        begin, end = np.where(long, start / resized, 0), np.where(long, (start + self.image_size) / resized, 1)
        size, start = np.where(long, self.image_size, resized), np.where(long, 0, start)
        return begin.astype(np.float32), end.astype(np.float32), size.astype(np.float32), start.astype(np.int32)
