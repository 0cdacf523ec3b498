"""The photometric operations in torch, bitwise identical to torchvision's for uint8 tensors.

The graph combines the colour jitter into one affine map. Here its operations are applied one by one, in each image's
own order, and each clamps and truncates to levels of 0..255. Only the blur may differ by one level: its two
one-dimensional passes round differently from torchvision's two-dimensional one.

The host knows which image gets which operation, so nothing waits for the device. The result of an image does not
depend on its batch.

Shapes: N images, S the side of a view, n images of a run. `levels` are fp32 [n, 3, S, S], integers 0..255;
operations change them in place.
"""

import math
from collections.abc import Callable
from itertools import groupby, permutations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from .parameters import Parameters
from .presets import DEVIATION, MEAN, View

_AT_A_TIME = 8  # images on a CPU: their memory stays in the caches, and is not returned to the system each time
ORDERS = tuple(permutations(range(4)))  # of brightness, contrast, saturation, hue; indexed by `Parameters.order`


def apply(view: View, crops: Tensor, parameters: Parameters) -> Tensor:
    """Applies jitter, gray, blur, solarize and flip to crops that were resized but not flipped.

    Args:
        view: its `blur_sigma` sets the width of the blur kernel.
        crops: uint8 [N, S, S, 3] on any device; not changed.
        parameters: parameters of the N images.

    Returns:
        fp32 [N, 3, S, S], normalised, channels-last, on the device of the crops.
    """
    count, side = crops.shape[:2]
    layout = {"dtype": torch.float32, "memory_format": torch.channels_last}
    images = torch.empty((count, 3, side, side), device=crops.device, **layout)
    step = _AT_A_TIME if crops.device.type == "cpu" else max(count, 1)
    for part in (slice(start, start + step) for start in range(0, count, step)):
        _apply(view, crops[part], parameters[part], images[part])
    return images


def _apply(view: View, crops: Tensor, parameters: Parameters, images: Tensor) -> None:
    """`apply` for a few images; writes into `images`."""
    device = crops.device
    # Images with the same order are adjacent, so that each operation finds its images in few runs.
    arranged = np.argsort(np.where(parameters.jitter, parameters.order, len(ORDERS)), kind="stable")
    levels = crops[_send(arranged, device)].permute(0, 3, 1, 2)
    levels = levels.to(torch.float32, memory_format=torch.contiguous_format)
    _jitter(levels, parameters, arranged[: np.count_nonzero(parameters.jitter)])

    def change(chosen: np.ndarray, operation: Callable[[Tensor], Tensor]) -> None:
        if (place := np.flatnonzero(chosen[arranged])).size:
            place = _send(place, device)
            levels.index_copy_(0, place, operation(levels[place]).expand(-1, 3, -1, -1))

    sigma = parameters.sigma[arranged][parameters.blur[arranged]]
    change(parameters.gray, _gray)
    change(parameters.blur, lambda some: _blur(some, sigma, view.blur_sigma[1]))
    change(parameters.solarize, lambda some: torch.minimum(some, 255 - some))  # the inverse from 128 on
    change(parameters.flip, lambda some: some.flip(-1))
    shift, scale = (_send(255 * np.float32(values)[:, None, None], device) for values in (MEAN, DEVIATION))
    images.copy_(levels.sub_(shift).div_(scale)[_send(np.argsort(arranged), device)])


def _send(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)


def _jitter(levels: Tensor, parameters: Parameters, chosen: np.ndarray) -> None:
    """Applies all four operations to the first images; `chosen` are their parameters, sorted by order."""
    names = ("brightness", "contrast", "saturation", "hue")
    factors = np.stack([getattr(parameters, name)[chosen] for name in names]).astype(np.float64)
    factors[3] /= 360
    both = np.stack([factors, 1 - factors]).astype(np.float32)[..., None, None, None]
    factor, rest = _send(both, levels.device)  # [4, n, 1, 1, 1]
    orders = [ORDERS[number] for number in parameters.order[chosen].tolist()]
    for position in range(4):
        stop = 0
        for operation, run in groupby(order[position] for order in orders):
            start, stop = stop, stop + len(list(run))
            part = slice(start, stop)
            _OPERATIONS[operation](levels[part], factor[operation, part], rest[operation, part])


def _brightness(levels: Tensor, factor: Tensor, _: Tensor) -> None:
    levels.mul_(factor).clamp_(max=255).floor_()


def _contrast(levels: Tensor, factor: Tensor, rest: Tensor) -> None:
    gray = _gray(levels)
    # Sums of integers are exact, in any order: in fp32 along a row, in float64 over all rows.
    mean = gray.sum(dim=-1).sum(dim=-1, dtype=torch.float64).div_(gray[0].numel())
    gray.copy_(mean[..., None, None])
    _blend(levels, factor, gray, rest)


def _saturation(levels: Tensor, factor: Tensor, rest: Tensor) -> None:
    _blend(levels, factor, _gray(levels), rest)


def _blend(levels: Tensor, factor: Tensor, other: Tensor, rest: Tensor) -> None:
    """factor · levels + rest · other.

    With `other` as [n, 1, S, S], rather than one number per image, addcmul rounds product and sum once, as does
    torchvision's addition with a factor.
    """
    levels.mul_(factor).addcmul_(other, rest).clamp_(0, 255).floor_()


def _gray(levels: Tensor) -> Tensor:
    """Gray levels [n, 1, S, S], with the weights and the truncation of torchvision."""
    red, green, blue = levels.unbind(dim=1)
    return red.mul(0.2989).add_(green, alpha=0.587).add_(blue, alpha=0.114).floor_().unsqueeze(1)


def _hue(levels: Tensor, turn: Tensor, _: Tensor) -> None:
    """Rotates the hue of HSV by fractions of a full turn.

    The largest and the smallest channel keep their levels and swap places; only the third is computed.
    """
    turn = turn[:, 0]
    red, green, blue = levels.unbind(dim=1)
    most = torch.maximum(torch.maximum(red, green), blue)
    least = torch.minimum(torch.minimum(red, green), blue)
    value = most * (1 / 255)
    span = value - least * (1 / 255)
    saturation = span / value.clamp(min=1e-3)  # less than one level: keeps 0/0 out
    far = value.unsqueeze(1) - levels * (1 / 255)
    from_red, from_green, from_blue = far.div_(span.clamp_(min=1e-3).unsqueeze_(1)).unbind(dim=1)
    # Choices are made in floating point, by 0 and 1 or by clamping: on a CPU that is 20 times as fast as torch.where.
    sixths = (from_green + 4).sub_(from_red)
    sixths = torch.lerp((from_red + 2).sub_(from_blue), sixths, from_green.sign())
    sixths = torch.lerp(from_blue - from_green, sixths, from_red.sign())
    hue = sixths.mul_(1 / 6).add_(1).frac_().add_(turn)
    hue.sub_(hue.floor()).mul_(6)
    sector = hue.floor()  # 0 to 5; 6, where the turn ends by rounding, chooses as 0 does
    share = hue.sub_(sector).mul_(saturation)
    falling = sector.mul(0.5).frac_().mul_(2)
    middle = torch.lerp((1 - saturation).add_(share), 1 - share, falling)
    middle.mul_(value).clamp_(0, 1).mul_(255.999).floor_()  # the 255.999 is torchvision's
    # Each channel is the largest in two neighbouring sectors, the smallest in the two opposite ones.
    for channel, centre, sign in ((red, 2.5, 1), (green, 1.5, -1), (blue, 3.5, -1)):
        distance = sector.sub(centre).abs_().sub_(1.5)
        torch.clamp(middle.add(distance, alpha=sign * 256), least, most, out=channel)


_OPERATIONS = _brightness, _contrast, _saturation, _hue


def _blur(levels: Tensor, sigma: np.ndarray, largest: float) -> Tensor:
    """Gaussian blur with reflected borders; one sigma per image, pixels; the kernel is cut at 3 times the largest."""
    count, _, side, _ = levels.shape
    radius = min(math.ceil(3 * largest), side - 1)
    place = np.arange(-radius, radius + 1)
    weight = np.exp(-0.5 * (place / sigma.astype(np.float64)[:, None]) ** 2)
    weight /= weight.sum(axis=1, keepdims=True)
    kernel = _send(weight.astype(np.float32), levels.device).repeat_interleave(3, dim=0)[:, None, :, None]
    # The images side by side as channels, each with a kernel of its own.
    padded = functional.pad(levels, (radius,) * 4, mode="reflect").flatten(0, 1)[None]
    with torch.autocast(levels.device.type, enabled=False):
        rows = torch.conv2d(padded, kernel, groups=3 * count)
        blurred = torch.conv2d(rows, kernel.mT, groups=3 * count)
    return blurred.view_as(levels).round_()
