"""Crops, resizes and recolours on the CPU, in torch, several times as fast as the DALI graph would there.

On a CPU, DALI's operators process one sample at a time in scalar code. Torch resizes uint8 images with vector
instructions, and colours and blurs are matrix products here. Shapes: n images, S the side of a view, 3 colours last.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .parameters import LUMA, LUMA_AS_GRAY, Parameters
from .presets import DEVIATION, MEAN, View

_PIXELS_AT_ONCE = 16  # in one row of a matrix product: 48 x 48 matrices are the fastest
_ROWS, _COLUMNS = 32, 16  # of a tile of the blur


def crop_and_resize(images: Sequence[Tensor], view: View, parameters: Parameters, out: Tensor) -> None:
    """Cuts the boxes out of the images, resizes and flips them.

    Args:
        images: uint8 [height, width, 3] each.
        parameters: of these n images.
        out: uint8 [n, S, S, 3], written in place.
    """
    p = parameters
    boxes = np.stack([p.x, p.y, p.width, p.height], axis=1).tolist()
    for image, (x, y, width, height), flip, place in zip(images, boxes, p.flip.tolist(), out, strict=True):
        box = image[None, y : y + height, x : x + width].contiguous().permute(0, 3, 1, 2)
        size = place.shape[:2]
        crop = F.interpolate(box, size=size, mode=view.interpolation, antialias=True)[0].permute(1, 2, 0)
        place.copy_(crop.flip(1) if flip else crop)


def recolour(view: View, crops: Tensor, parameters: Parameters, out: Tensor) -> None:
    """Jitter as one affine map of colours, gray, blur, solarize, and normalisation.

    Args:
        crops: uint8 [n, S, S, 3].
        parameters: of these n images.
        out: fp32 [n, S, S, 3], written in place.
    """
    count, side = crops.shape[:2]
    pixels = crops.float()
    mean = pixels.view(count, -1, 48 if side % 4 == 0 else 3).mean(1).view(count, -1, 3).mean(1).double().numpy()
    matrix = np.where(parameters.jitter[:, None, None], parameters.colour_matrix(), np.eye(3))
    offset = np.where(parameters.jitter, parameters.luma_share() * (mean @ LUMA), 0)[:, None]
    _map_colours(pixels, matrix / _SCALE[:, None], (offset - _SHIFT) / _SCALE, out)
    out.view(count, -1).clamp_(*_limits(side))

    for apply, change in (
        (parameters.gray, _to_gray),
        (parameters.blur, lambda images: gaussian_blur(images, parameters.sigma[parameters.blur], view.blur_sigma[1])),
        (parameters.solarize, _solarize),
    ):
        if apply.any():
            chosen = torch.from_numpy(np.flatnonzero(apply))
            out.index_copy_(0, chosen, change(out.index_select(0, chosen)))


_SHIFT, _SCALE = 255 * np.array(MEAN), 255 * np.array(DEVIATION)


@lru_cache(maxsize=4)
def _limits(side: int) -> tuple[Tensor, Tensor]:
    """The smallest and the largest possible value of each element of a normalised image, fp32 [3 S²]."""
    least, most = ((limit - _SHIFT) / _SCALE for limit in (0, 255))
    return tuple(torch.from_numpy(np.tile(limit.astype(np.float32), side * side)) for limit in (least, most))


def _map_colours(images: Tensor, matrix: np.ndarray, offset: np.ndarray, out: Tensor) -> None:
    """matrix @ colour + offset, [n, 3, 3] and [n, 3], of every pixel; several pixels form a row of the product."""
    count, side = images.shape[:2]
    run = math.gcd(side * side, _PIXELS_AT_ONCE)
    blocks = np.zeros((count, run, 3, run, 3), np.float32)
    blocks[:, np.arange(run), :, np.arange(run)] = matrix.swapaxes(1, 2)
    torch.baddbmm(
        torch.from_numpy(np.tile(offset, (1, run))[:, None].astype(np.float32)),
        images.view(count, -1, 3 * run),
        torch.from_numpy(blocks.reshape(count, 3 * run, 3 * run)),
        out=out.view(count, -1, 3 * run),
    )


def _to_gray(images: Tensor) -> Tensor:
    """Gray versions of normalised images."""
    matrix = np.broadcast_to(LUMA_AS_GRAY * _SCALE / _SCALE[:, None], (len(images), 3, 3))
    offset = np.broadcast_to((_SHIFT @ LUMA - _SHIFT) / _SCALE, (len(images), 3))
    out = torch.empty_like(images)
    _map_colours(images, matrix, offset, out)
    return out


def _solarize(images: Tensor) -> Tensor:
    """Normalised images in which values from 128 on are inverted."""
    middle = torch.from_numpy(((127.5 - _SHIFT) / _SCALE).astype(np.float32))
    return torch.minimum(images, 2 * middle - images)


def gaussian_blur(images: Tensor, sigma: np.ndarray, most: float) -> Tensor:
    """Each image blurred by its own Gaussian, with reflected borders.

    Both passes are products with band matrices, tile by tile.

    Args:
        images: fp32 [n, S, S, 3].
        sigma: float32 [n], pixels.
        most: the largest sigma allowed; it sets the width of every kernel, so that no image depends on the others.
    """
    count, side = images.shape[:2]
    radius = math.ceil(3 * most)
    bands = _bands(sigma, side, radius)
    rows = images.reshape(count, side, 3 * side)
    columns, blurred = torch.empty_like(rows), torch.empty_like(rows)
    tile = _divisor(side, _ROWS)
    for start in range(0, side, tile):
        first, last = max(0, start - radius), min(side, start + tile + radius)
        band = bands[:, start : start + tile, first:last]
        torch.bmm(band, rows[:, first:last], out=columns[:, start : start + tile])
    tile, was_inner = _divisor(side, _COLUMNS), False
    for start in range(0, side, tile):
        first, last = max(0, start - radius), min(side, start + tile + radius)
        inner = first == start - radius and last == start + tile + radius
        if not (inner and was_inner):  # the bands of all inner tiles are equal
            band = _for_colours(bands[:, start : start + tile, first:last])
        was_inner = inner
        inside, place = slice(3 * first, 3 * last), slice(3 * start, 3 * (start + tile))
        torch.bmm(columns[:, :, inside], band, out=blurred[:, :, place])
    return blurred.view(count, side, side, 3)


def _bands(sigma: np.ndarray, side: int, radius: int) -> Tensor:
    """Matrices [n, S, S] that blur a column; beyond the border the image is reflected without repeating the border."""
    distance = np.arange(-radius, radius + 1)
    weights = np.exp(-0.5 * (distance / sigma[:, None].astype(np.float64)) ** 2)
    weights[weights < 1e-8] = 0  # denormal numbers among them would be a hundred times slower
    weights = torch.from_numpy((weights / weights.sum(1, keepdims=True)).astype(np.float32))
    period = max(1, 2 * side - 2)
    source = (np.arange(side)[:, None] + distance) % period
    source = torch.from_numpy(np.minimum(source, period - source))
    bands = torch.zeros(len(sigma), side, side, dtype=torch.float32)
    return bands.scatter_add_(2, source.expand(len(sigma), -1, -1), weights[:, None].expand(-1, side, -1))


def _for_colours(band: Tensor) -> Tensor:
    """Bands [n, a, b] that blur a row, as matrices [n, 3 b, 3 a] to multiply 3 interleaved colours from the right."""
    count, rows, columns = band.shape
    matrix = band.new_zeros(count, columns, 3, rows, 3)
    for colour in range(3):
        matrix[:, :, colour, :, colour] = band.transpose(1, 2)
    return matrix.view(count, 3 * columns, 3 * rows)


def _divisor(number: int, most: int) -> int:
    return max(divisor for divisor in range(1, most + 1) if number % divisor == 0)
