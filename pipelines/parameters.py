"""Every random number of an augmentation: a pure function of (seed, epoch, image, view).

The numbers come from `philox`, for a whole batch at once.
"""

from dataclasses import dataclass

import numpy as np

from .philox import VIEW, philox
from .presets import View

LUMA = np.array([0.299, 0.587, 0.114])  # ITU-R 601, as torchvision and Pillow have it
TRIES = 10  # of torchvision's random-resized-crop, before it takes the central crop


@dataclass(frozen=True)
class Parameters:
    """The augmentation of each of N images for one view; every array has N entries.

    Attributes:
        x, y, width, height: int32, the crop, in pixels of the source image.
        jitter, gray, blur, solarize, flip: bool, whether the operation is applied.
        brightness, contrast, saturation: float32 factors; 1 leaves the image as it is.
        hue: float32, degrees.
        order: int32, which of the 24 orders of brightness, contrast, saturation and hue is used, sorted
            lexicographically; 0 is the order given here, 23 its reverse.
        sigma: float32, deviation of the blur in pixels of the view.
    """

    x: np.ndarray
    y: np.ndarray
    width: np.ndarray
    height: np.ndarray
    jitter: np.ndarray
    brightness: np.ndarray
    contrast: np.ndarray
    saturation: np.ndarray
    hue: np.ndarray
    order: np.ndarray
    gray: np.ndarray
    blur: np.ndarray
    sigma: np.ndarray
    solarize: np.ndarray
    flip: np.ndarray

    def __getitem__(self, part: slice) -> "Parameters":
        """The parameters of a slice of the images."""
        return Parameters(**{name: values[part] for name, values in vars(self).items()})

    def colour_matrix(self) -> np.ndarray:
        """The jitter's linear part, float32 [N, 3, 3]:
        brightness · contrast · (luma + saturation · turned chroma).

        In this form the four operations commute, so their order does not matter; only the clamping to 0..255
        between them, which torchvision does, is left out. Hue turns around the gray axis and keeps the luma.
        Its angle equals that of HSV up to the difference between a circle and HSV's hexagon, about a degree;
        torchvision keeps the largest channel instead of the luma.
        """
        angle = np.deg2rad(self.hue.astype(np.float64))[:, None, None]
        turned = _WITHOUT_LUMA @ (np.cos(angle) * _WITHOUT_GRAY + np.sin(angle) * _QUARTER_TURN)
        gain = (self.brightness * self.contrast)[:, None, None]
        return (gain * (LUMA_AS_GRAY + self.saturation[:, None, None] * turned)).astype(np.float32)

    def luma_share(self) -> np.ndarray:
        """The jitter's constant part, float32 [N], as a share of the mean luma: brightness · (1 − contrast).

        Contrast turns around the mean luma of the image, as in torchvision.
        """
        return self.brightness * (1 - self.contrast)


# Linear maps of a colour.
LUMA_AS_GRAY = np.tile(LUMA, (3, 1))
_WITHOUT_LUMA = np.eye(3) - LUMA_AS_GRAY
_WITHOUT_GRAY = np.eye(3) - 1 / 3  # onto the plane orthogonal to the gray axis
_QUARTER_TURN = np.array([[0, -1, 1], [1, 0, -1], [-1, 1, 0]]) / np.sqrt(3)  # there, red towards green


def sample(view: View, view_number: int, seed: int, epoch: int, index: np.ndarray, sizes: np.ndarray) -> Parameters:
    """Draws the parameters of one view of N images.

    Args:
        view: ranges and probabilities.
        view_number: index of the view in the preset, from 0.
        seed: seed of the run.
        epoch: from 0.
        index: int64 [N], positions in the manifest.
        sizes: [N, 2], width and height of the source images.
    """
    blocks = np.arange(TRIES + 3)[:, None]
    bits = philox(seed, epoch, np.asarray(index), stream=VIEW + view_number, block=blocks)
    uniform = (bits + 0.5) * 2.0**-32  # [4, blocks, N], float64, in the open interval (0, 1)
    x, y, width, height = _crop(view, uniform[:, :TRIES], np.asarray(sizes))
    factors, (jitter, gray, blur, solarize), (sigma, flip, order, _) = uniform[:, TRIES:].swapaxes(0, 1)
    brightness, contrast, saturation = (
        _between(max(0.0, 1 - spread), 1 + spread, draw)
        for spread, draw in zip(view.jitter[:3], factors[:3], strict=True)
    )
    return Parameters(
        x=x,
        y=y,
        width=width,
        height=height,
        jitter=jitter < view.jitter_probability,
        brightness=brightness,
        contrast=contrast,
        saturation=saturation,
        hue=_between(-360 * view.jitter[3], 360 * view.jitter[3], factors[3]),
        order=(24 * order).astype(np.int32),
        gray=gray < view.gray_probability,
        blur=blur < view.blur_probability,
        sigma=_between(*view.blur_sigma, sigma),
        solarize=solarize < view.solarize_probability,
        flip=flip < view.flip_probability,
    )


def _between(low: float, high: float, uniform: np.ndarray) -> np.ndarray:
    return (low + (high - low) * uniform).astype(np.float32)


def _crop(view: View, uniform: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, ...]:
    """torchvision's random-resized-crop: the first of ten boxes that fits, else the central one.

    Args:
        uniform: [4, TRIES, N], for area, ratio, x and y of each try.
        sizes: [N, 2].

    Returns:
        x, y, width, height, int32 [N] each.
    """
    image_width, image_height = sizes[:, 0].astype(np.int64), sizes[:, 1].astype(np.int64)
    area = (view.scale[0] + (view.scale[1] - view.scale[0]) * uniform[0]) * image_width * image_height
    low, high = np.log(view.ratio)
    ratio = np.exp(low + (high - low) * uniform[1])
    width = np.rint(np.sqrt(area * ratio)).astype(np.int64)  # [TRIES, N]
    height = np.rint(np.sqrt(area / ratio)).astype(np.int64)
    fits = (width > 0) & (width <= image_width) & (height > 0) & (height <= image_height)
    first, lane = fits.argmax(axis=0), np.arange(len(sizes))
    some = fits[first, lane]

    central_width = np.minimum(image_width, np.rint(image_height * view.ratio[1]).astype(np.int64))
    central_height = np.minimum(image_height, np.rint(image_width / view.ratio[0]).astype(np.int64))
    width = np.where(some, width[first, lane], np.maximum(central_width, 1))
    height = np.where(some, height[first, lane], np.maximum(central_height, 1))
    free_x, free_y = image_width - width, image_height - height
    x = np.where(some, np.floor(uniform[2, first, lane] * (free_x + 1)), free_x // 2)
    y = np.where(some, np.floor(uniform[3, first, lane] * (free_y + 1)), free_y // 2)
    return tuple(part.astype(np.int32) for part in (x, y, width, height))
