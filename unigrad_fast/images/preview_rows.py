"""A few images with their views: the first ones of an epoch, made by the loader of training.

The boxes come from the function that draws the loader's random numbers. Shapes: S the side of a view, pixels.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from unigrad_fast.pipelines import CutMix, Loader, Manifest, View
from unigrad_fast.pipelines.parameters import Parameters, sample
from unigrad_fast.pipelines.presets import DEVIATION, GLOBALS, MEAN
from unigrad_fast.pipelines.reading.damage import decoded
from unigrad_fast.runtime.errors import UserError
from unigrad_fast.runtime.wording import count

Box = tuple[int, int, int, int]  # left, top, right, bottom, pixels


@dataclass(frozen=True)
class Mixed:
    """A global view with a box of another image.

    Attributes:
        pixels: uint8 [S, S, 3].
        partner: index of the image that the box comes from, from 0.
        ratio: share of the area that still shows this image; 1 if nothing was mixed.
        box: the pasted box, in the view.
    """

    pixels: np.ndarray
    partner: int
    ratio: float
    box: Box

    def shares(self) -> list[str]:
        """How the area is divided, as text; images count from 1."""
        if self.ratio == 1:
            return ["not mixed"]
        own = round(100 * self.ratio)
        return [f"{own} % its own", f"{100 - own} % of image {self.partner + 1}"]


@dataclass(frozen=True)
class Row:
    """One image and its views.

    Attributes:
        name: of the file.
        original: the whole image, RGB.
        boxes: the crop of each view, in the image.
        views: uint8 [S, S, 3] each, as the network sees them, but for the normalisation.
        applied: what was done to each view after the crop.
        mixed: the global views after CutMix, if any.
    """

    name: str
    original: Image.Image
    boxes: list[Box]
    views: list[np.ndarray]
    applied: list[list[str]]
    mixed: list[Mixed] = field(default_factory=list)

    def share(self, number: int) -> float:
        """A crop's share of the image's area."""
        left, top, right, bottom = self.boxes[number]
        return (right - left) * (bottom - top) / (self.original.width * self.original.height)


def collect(
    manifest: Manifest,
    views: tuple[View, ...],
    images: int,
    seed: int,
    epoch: int,
    cutmix: CutMix | None = None,
    photometric: str = "dali",
) -> list[Row]:
    """The first images of an epoch with their views, from the loader; any of them may be partners."""
    if cutmix is not None and images < 2:
        raise UserError(f"CutMix needs at least two images, but there is {count(images, 'image')}; give more")
    mixing = None if cutmix is None else replace(cutmix, group=images)
    loader = Loader(manifest, views, images, seed, cutmix=mixing, photometric=photometric)
    step = epoch * loader.steps_per_epoch
    (batch,) = loader.iterate(step, step + 1)
    index = batch.index.numpy()
    asked = loader.indices(step)[1]  # replacements use the random numbers of the requested images
    drawn = [sample(view, number, seed, epoch, asked, manifest.sizes[index]) for number, view in enumerate(views)]
    boxes = [np.stack([p.x, p.y, p.x + p.width, p.y + p.height], axis=1).tolist() for p in drawn]
    pixels = [_pixels(view) for view in batch.views]
    rows = []
    originals = decoded(np.frombuffer(manifest.read(image), np.uint8) for image in index.tolist())
    for place, (image, original) in enumerate(zip(index.tolist(), originals, strict=True)):
        rows.append(
            Row(
                name=Path(manifest.path(image)).name,
                original=Image.fromarray(original),
                boxes=[tuple(box[place]) for box in boxes],
                views=[view[place] for view in pixels],
                applied=[operations(parameters, place) for parameters in drawn],
            )
        )
    if batch.mix is not None:
        mix = batch.mix
        for view, mixed in enumerate(_pixels(view) for view in mix.apply(batch.views[:GLOBALS])):
            for place, row in enumerate(rows):
                box = tuple(mix.box[view, place].tolist())
                row.mixed.append(Mixed(mixed[place], int(mix.partner[view, place]), float(mix.ratio[view, place]), box))
    return rows


def operations(parameters: Parameters, place: int) -> list[str]:
    """The operations on one image's view after the crop, in order."""
    done = [name for name in ("jitter", "gray", "blur", "solarize", "flip") if getattr(parameters, name)[place]]
    return [f"blur {parameters.sigma[place]:.1f}" if name == "blur" else name for name in done]


def _pixels(view: torch.Tensor) -> np.ndarray:
    """A normalised view, fp32 [N, 3, S, S], as uint8 [N, S, S, 3]."""
    values = view.permute(0, 2, 3, 1).numpy() * np.float32(DEVIATION) + np.float32(MEAN)
    return np.rint(255 * values).clip(0, 255).astype(np.uint8)
