"""Augmentation presets as data: one `View` per crop that is taken of an image."""

import math
from dataclasses import dataclass, fields, replace
from typing import Any

from .errors import DataError

MEAN = (0.485, 0.456, 0.406)  # of ImageNet, red green blue, on the scale 0..1
DEVIATION = (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class View:
    """How one view is drawn. Ranges and probabilities mean what they mean in torchvision.

    Attributes:
        size: side of the square view, pixels.
        scale: range of the crop's area as a share of the image's area.
        ratio: range of the crop's width / height, drawn uniformly in its logarithm.
        interpolation: `bilinear` or `bicubic`, both with antialiasing.
        jitter: brightness, contrast and saturation factors are drawn from 1 ± these (not below 0); hue
            turns by up to the fourth, in full turns.
        jitter_probability, gray_probability, blur_probability, solarize_probability, flip_probability:
            share of the views to which each operation is applied.
        blur_sigma: range of the Gaussian's deviation, pixels of the finished view.
    """

    size: int = 224
    scale: tuple[float, float] = (0.2, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    interpolation: str = "bilinear"
    jitter: tuple[float, float, float, float] = (0.4, 0.4, 0.4, 0.1)
    jitter_probability: float = 0.8
    gray_probability: float = 0.2
    blur_probability: float = 0.5
    blur_sigma: tuple[float, float] = (0.1, 2.0)
    solarize_probability: float = 0.0
    flip_probability: float = 0.5

    def __post_init__(self) -> None:
        for name in ("scale", "ratio", "blur_sigma"):
            low, high = getattr(self, name)
            if not (0 < low <= high and math.isfinite(high)):
                raise DataError(f"{name} ({low}, {high}) is no range; use 0 < low <= high")
        if self.scale[1] > 1:
            raise DataError(f"scale {self.scale} asks for more than the whole image; use at most 1")
        for name in (field.name for field in fields(self) if field.name.endswith("_probability")):
            if not 0 <= getattr(self, name) <= 1:
                raise DataError(f"{name} {getattr(self, name)} is no probability; use 0 to 1")
        if self.size < 1:
            raise DataError(f"view size {self.size} is not positive; use 224, or 32 for small images")
        if self.interpolation not in ("bilinear", "bicubic"):
            raise DataError(f"interpolation {self.interpolation!r} is unknown; use 'bilinear' or 'bicubic'")
        if min(self.jitter) < 0 or self.jitter[3] > 0.5:
            raise DataError(f"jitter {self.jitter} is out of range; use values from 0, and a hue up to 0.5")


_SIMSIAM = View()
# One view, cropped and flipped: what a classifier on frozen features is trained on (the paper, linear evaluation).
_LINEAR = View(scale=(0.08, 1.0), jitter_probability=0.0, gray_probability=0.0, blur_probability=0.0)
RECIPES: dict[str, tuple[View, ...]] = {"simsiam": (_SIMSIAM, _SIMSIAM), "linear": (_LINEAR,)}


def recipe(name: str, image_size: int = 224, **override: Any) -> tuple[View, ...]:
    """The views of a preset, at another size or with other values in every view.

    Args:
        name: a key of `RECIPES`.
        image_size: side of the views, pixels.
        override: fields of `View` to replace in each view, for instance `scale=(0.08, 1.0)`.

    Raises:
        DataError: the preset or a field does not exist, or a value is out of range.
    """
    if name not in RECIPES:
        raise DataError(f"augmentation recipe {name!r} is unknown; use one of {', '.join(RECIPES)}")
    known = [field.name for field in fields(View) if field.name != "size"]
    unknown = override.keys() - set(known)
    if unknown:
        raise DataError(f"a view has no field {', '.join(sorted(unknown))}; use one of {', '.join(known)}")
    return tuple(replace(view, size=image_size, **override) for view in RECIPES[name])
