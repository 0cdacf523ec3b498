"""Augmentation presets as data: one `View` per crop of an image, the two global ones first."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from .errors import DataError

MEAN = (0.485, 0.456, 0.406)  # of ImageNet; red, green, blue on the scale 0..1
DEVIATION = (0.229, 0.224, 0.225)
GLOBALS = 2  # views that the target branch sees
_LONGEST = 4096  # largest short side, in pixels, to which an image is resized before cropping
_WIDEST = 128  # largest standard deviation of a blur, pixels


@dataclass(frozen=True)
class View:
    """How one view is drawn. Ranges and probabilities have the same meaning as in torchvision.

    Attributes:
        size: side of the square view, pixels.
        scale: range of the crop's area as a share of the image's area.
        ratio: range of the crop's width / height, drawn uniformly in its logarithm.
        interpolation: `bilinear` or `bicubic`, both with antialiasing.
        jitter: brightness, contrast and saturation factors are drawn from 1 ± the first three values (not below 0); hue
            rotates by up to the fourth, in full turns.
        jitter_probability, gray_probability, blur_probability, solarize_probability, flip_probability:
            share of the views to which each operation is applied.
        blur_sigma: range of the Gaussian's standard deviation, pixels of the finished view.
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
                problem = "low exceeds high; swap them" if low > high > 0 else "use 0 < low <= high"
                raise DataError(f"{name} = {low:g},{high:g}: {problem}")
        if self.ratio[0] < 0.01 or self.ratio[1] > 100:
            raise DataError(f"ratio {self.ratio} is out of range; use 0.01 to 100")
        if self.blur_sigma[0] < 0.01 or self.blur_sigma[1] > _WIDEST:
            raise DataError(f"blur_sigma {self.blur_sigma} is out of range; use 0.01 to {_WIDEST}")
        if self.scale[1] > 1:
            raise DataError(f"scale {self.scale} asks for more than the whole image; use at most 1")
        for name in (field.name for field in fields(self) if field.name.endswith("_probability")):
            if not 0 <= getattr(self, name) <= 1:
                raise DataError(f"{name} {getattr(self, name)} is not a probability; use 0 to 1")
        if self.size < 1:
            raise DataError(f"view size {self.size} is not positive; use 224, or 32 for small images")
        if self.interpolation not in ("bilinear", "bicubic"):
            raise DataError(f"interpolation {self.interpolation!r} is unknown; use 'bilinear' or 'bicubic'")
        if min(self.jitter) < 0 or self.jitter[3] > 0.5:
            raise DataError(f"jitter {self.jitter} is out of range; use values of at least 0, and a hue up to 0.5")
        if max(self.jitter) > 100:
            raise DataError(f"jitter {self.jitter} is out of range; use values up to 100")


def short_side(image_size: int, crop_fraction: float) -> int:
    """Pixels to which the short side is resized before the central crop takes that fraction of it.

    Raises:
        DataError: the fraction is out of range, or so small that the image would become too large.
    """
    if not 0 < crop_fraction <= 1:
        raise DataError(f"crop fraction {crop_fraction} is out of range; use 0.875, or up to 1")
    if image_size / crop_fraction > _LONGEST:
        least = math.ceil(1000 * image_size / _LONGEST) / 1000
        raise DataError(
            f"a crop of {image_size} pixels would need images of more than {_LONGEST} pixels; use "
            + (f"{least:g} to 1" if least <= 1 else f"images of at most {_LONGEST} pixels")
        )
    return round(image_size / crop_fraction)


@dataclass(frozen=True)
class Preset:
    """An augmentation preset.

    Attributes:
        views: the views, the global ones first.
        source: publication of the numbers.
    """

    views: tuple[View, ...]
    source: str


_SIMSIAM = View()
_BYOL = View(
    scale=(0.08, 1.0),
    interpolation="bicubic",
    jitter=(0.4, 0.4, 0.2, 0.1),
    blur_probability=1.0,
)
_BYOL_2 = replace(_BYOL, blur_probability=0.1, solarize_probability=0.2)
_DINO, _DINO_2 = replace(_BYOL, scale=(0.4, 1.0)), replace(_BYOL_2, scale=(0.4, 1.0))
_DINO_LOCAL = replace(_BYOL, size=96, scale=(0.05, 0.4), blur_probability=0.5)
_SWAV = View(scale=(0.14, 1.0), jitter=(0.8, 0.8, 0.8, 0.2))
_SWAV_LOCAL = replace(_SWAV, size=96, scale=(0.05, 0.14))
_MULTICROP, _MULTICROP_LOCAL = View(scale=(0.4, 1.0)), View(size=96, scale=(0.05, 0.4))
# One view, cropped and flipped, for training a classifier on frozen features.
_LINEAR = View(scale=(0.08, 1.0), jitter_probability=0.0, gray_probability=0.0, blur_probability=0.0)

PRESETS: dict[str, Preset] = {
    "simsiam": Preset((_SIMSIAM,) * 2, "Chen and He, 2021, section 3; the UniGrad paper's two views"),
    "byol": Preset((_BYOL, _BYOL_2), "Grill et al., 2020, appendix B, table 6"),
    "dino": Preset(
        (_DINO, _DINO_2, *(_DINO_LOCAL,) * 6), "Caron et al., 2021: the defaults of its code, with 6 local views"
    ),
    "swav": Preset((_SWAV,) * 2 + (_SWAV_LOCAL,) * 6, "Caron et al., 2020, and its code for ResNet-50"),
    "multicrop": Preset(
        (_MULTICROP,) * 2 + (_MULTICROP_LOCAL,) * 6,
        'the UniGrad paper, "Application on Data Augmentations"; colours as in simsiam',
    ),
    "linear": Preset((_LINEAR,), "the UniGrad paper, linear evaluation"),
}


@dataclass(frozen=True)
class Growth:
    """Smaller views in the first epochs, for speed: the side of the global views grows over the epochs.

    Attributes:
        start: side of the global views in epoch 0, pixels.
        epochs: number of epochs over which it grows evenly; afterwards all views have their full size.
        multiple: while they grow, the sides of all views are multiples of this, pixels, and at most the full size.
    """

    start: int
    epochs: int
    multiple: int = 16

    def views(self, views: tuple[View, ...], epoch: int) -> tuple[View, ...]:
        """The views of an epoch, all scaled by the growth of the global ones."""
        full = views[0].size
        share = min(1.0, (self.start + (full - self.start) * epoch / self.epochs) / full)
        if share == 1:
            return views
        return tuple(
            replace(view, size=min(view.size, max(1, round(view.size * share / self.multiple)) * self.multiple))
            for view in views
        )

    def check(self, views: tuple[View, ...]) -> None:
        """Raises `DataError` if views cannot grow like this."""
        full = views[0].size
        if not self.multiple <= self.start <= full:
            raise DataError(f"views cannot grow from {self.start} to {full} pixels; start at {self.multiple} to {full}")
        if self.epochs < 1 or self.multiple < 1:
            raise DataError(
                f"views cannot grow in {self.epochs} epochs by multiples of {self.multiple}; use at least 1"
            )


def preset_views(
    name: str,
    image_size: int | None = None,
    *,
    local_crops: int | None = None,
    global_views: Mapping[str, Any] | None = None,
    second_view: Mapping[str, Any] | None = None,
    local_views: Mapping[str, Any] | None = None,
    **override: Any,
) -> tuple[View, ...]:
    """The views of a preset, optionally with another size, number or values.

    Args:
        name: a key of `PRESETS`.
        image_size: side of the global views, pixels; None is the preset's.
        local_crops: number of local views; None is the preset's. A preset without any takes those of "multicrop".
        override, global_views, second_view, local_views: fields of `View` to replace in every view, in the
            global ones, in the second of them, in the local ones; the later take precedence.

    Raises:
        DataError: the preset or a field does not exist, or a value is out of range.
    """
    if name not in PRESETS:
        raise DataError(f"augmentation preset {name!r} is unknown; use one of {', '.join(PRESETS)}")
    views = PRESETS[name].views
    both, local = list(views[:GLOBALS]), list(views[GLOBALS:])
    if local_crops is not None:
        if local_crops < 0:
            raise DataError(f"local_crops = {local_crops}: must be at least 0; the presets have 6")
        local = [local[0] if local else _MULTICROP_LOCAL] * local_crops
    size = {} if image_size is None else {"size": image_size}
    changed = [_replace(view, {**size, **override, **(global_views or {})}) for view in both]
    if second_view:
        if len(changed) < GLOBALS:
            raise DataError(f"second_view does not apply, because the preset {name} has one view; leave it out")
        changed[1] = _replace(changed[1], second_view)
    return (*changed, *(_replace(view, {**override, **(local_views or {})}) for view in local))


def _replace(view: View, changes: Mapping[str, Any]) -> View:
    known = [field.name for field in fields(View)]
    if unknown := changes.keys() - set(known):
        raise DataError(f"a view has no field {', '.join(sorted(unknown))}; use one of {', '.join(known)}")
    return replace(view, **changes)
