"""The variants of the data path, each yielding endless batches: ours, three of torchvision, and only decoding."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageFilter
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler
from torchvision import transforms
from torchvision.io import decode_image
from torchvision.transforms import InterpolationMode, v2

from unigrad_fast.benchmarks.harness.images import read_image
from unigrad_fast.pipelines import Loader, Manifest
from unigrad_fast.pipelines.presets import DEVIATION, MEAN, View

QUEUE = 2  # batches that a DataLoader prefetches per worker process
LEAST_WARMUP = 4  # batches; at least as many as DALI prefetches
ENDLESS = 2**40

Batches = Generator[object, None, None]
Blur = Callable[[View], Callable[[Any], Any]]


@dataclass(frozen=True)
class Setting:
    """The task of every variant.

    Attributes:
        views: the preset's views.
        images, cache: folder of the files, and folder for the manifest's cache.
        batch_size: images per batch.
        threads: threads of ours, and worker processes of the others.
        device: device of ours, "cpu" or "gpu".
    """

    views: tuple[View, ...]
    images: Path
    cache: Path
    batch_size: int
    threads: int
    device: str

    @property
    def warmup(self) -> int:
        """Number of batches that may be in the queues when a block begins."""
        return max(LEAST_WARMUP, QUEUE * self.threads)

    def manifest(self) -> Manifest:
        return Manifest.open(self.images, self.cache)

    def loader(self) -> Loader:
        return Loader(self.manifest(), self.views, self.batch_size, device=self.device, threads=self.threads)


def ours(setting: Setting) -> Batches:
    for batch in setting.loader().iterate():
        yield batch.views


def torchvision(
    kit: ModuleType, read: Callable[[bytes], Any], blur: Blur, tail: Sequence[Callable], setting: Setting
) -> Batches:
    augment = [augmentation(view, kit, blur, tail) for view in setting.views]

    def transform(data: bytes) -> list[Tensor]:
        image = read(data)
        return [view(image) for view in augment]

    yield from torch_batches(setting, transform)


def dali_decoding(setting: Setting) -> Batches:
    from nvidia.dali import fn, pipeline_def, types

    manifest = setting.manifest()
    on_gpu = setting.device == "gpu"
    order = iter(RandomSampler(manifest, num_samples=ENDLESS))

    def encoded() -> list[np.ndarray]:
        return [np.frombuffer(manifest.read(next(order)), np.uint8) for _ in range(setting.batch_size)]

    @pipeline_def(
        batch_size=setting.batch_size,
        num_threads=setting.threads,
        device_id=torch.cuda.current_device() if on_gpu else None,
        prefetch_queue_depth=2,
    )
    def define() -> Any:
        data = fn.external_source(source=encoded, batch=True)
        device = "mixed" if on_gpu else "cpu"
        return fn.decoders.image(data, device=device, output_type=types.RGB, adjust_orientation=False)

    pipeline = define()
    while True:
        yield pipeline.run()


def pillow_decoding(setting: Setting) -> Batches:
    yield from torch_batches(setting, lambda data: read_image(data).size)


def augmentation(view: View, kit: ModuleType, blur: Blur, tail: Sequence[Callable]) -> Callable[[Any], Tensor]:
    """A preset's view by torchvision: a decoded image to a normalised tensor [3, size, size].

    Args:
        view: the view's parameters.
        kit: `torchvision.transforms` or its `v2`.
        blur: makes the view's function that blurs an image.
        tail: operations that convert the result to an fp32 tensor in 0..1.
    """
    steps = [
        kit.RandomResizedCrop(view.size, view.scale, view.ratio, InterpolationMode(view.interpolation), antialias=True)
    ]
    if view.jitter_probability:
        steps.append(kit.RandomApply([kit.ColorJitter(*view.jitter)], view.jitter_probability))
    if view.gray_probability:
        steps.append(kit.RandomGrayscale(view.gray_probability))
    if view.blur_probability:
        steps.append(kit.RandomApply([blur(view)], view.blur_probability))
    if view.solarize_probability:
        steps.append(kit.RandomSolarize(128, view.solarize_probability))
    return kit.Compose([*steps, kit.RandomHorizontalFlip(view.flip_probability), *tail, kit.Normalize(MEAN, DEVIATION)])


def blur_image(view: View) -> Callable[[Image.Image], Image.Image]:
    return lambda image: image.filter(ImageFilter.GaussianBlur(random.uniform(*view.blur_sigma)))


def blur_tensor(view: View) -> Callable[[Tensor], Tensor]:
    return v2.GaussianBlur(2 * int(np.ceil(3 * view.blur_sigma[1])) + 1, view.blur_sigma)


def read_tensor(data: bytes) -> Tensor:
    """uint8 [3, H, W]; decoded by Pillow if torchvision has no decoder for the file."""
    try:
        return decode_image(torch.frombuffer(bytearray(data), dtype=torch.uint8), "RGB")
    except RuntimeError:
        return v2.functional.pil_to_tensor(read_image(data))


@dataclass(frozen=True)
class Files(Dataset):
    """The images of a manifest, transformed from their encoded bytes."""

    manifest: Manifest
    transform: Callable[[bytes], object]

    def __len__(self) -> int:
        return len(self.manifest)

    def __getitem__(self, index: int) -> object:
        return self.transform(self.manifest.read(index))


def torch_batches(setting: Setting, transform: Callable[[bytes], object]) -> Batches:
    files = Files(setting.manifest(), transform)
    yield from DataLoader(
        files,
        batch_size=setting.batch_size,
        # One iteration for all batches, so that worker processes are started only once.
        sampler=RandomSampler(files, num_samples=ENDLESS),
        num_workers=setting.threads,
        prefetch_factor=QUEUE,
        multiprocessing_context="fork",  # because the transforms are closures; also the default in a plain script
    )


OURS, DALI, PILLOW = "ours", "DALI, decoding alone", "Pillow, decoding alone"
TO_FLOAT = v2.ToDtype(torch.float32, scale=True)
TORCHVISION: dict[str, Callable[[Setting], Batches]] = {
    "torchvision v1": partial(torchvision, transforms, read_image, blur_image, [transforms.ToTensor()]),
    "torchvision v2, Pillow": partial(torchvision, v2, read_image, blur_image, [v2.ToImage(), TO_FLOAT]),
    "torchvision v2, tensors": partial(torchvision, v2, read_tensor, blur_tensor, [TO_FLOAT]),
}
VARIANTS = {OURS: ours, **TORCHVISION, DALI: dali_decoding, PILLOW: pillow_decoding}


def variant(what: str, setting: Setting) -> Batches:
    return VARIANTS[what](setting)


NAMED: dict[str, Callable[[Setting], Batches]] = {what: partial(variant, what) for what in VARIANTS}
