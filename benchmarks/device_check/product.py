"""Products between two norms on a device: errors against float64, and times against cuDNN and separate passes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from unigrad_fast.benchmarks.device_check.finding import Finding
from unigrad_fast.benchmarks.device_check.norm import DTYPES_ON_A_GPU, GATE, GROUPS, kernel_milliseconds
from unigrad_fast.benchmarks.harness.record import append
from unigrad_fast.benchmarks.harness.turns import distance
from unigrad_fast.runtime.precision import fastest_convolutions

EPS = 1e-5


class Layer(NamedTuple):
    """A 1×1 convolution: its channels, the side of its feature map, whether a norm precedes it, how many there are."""

    inputs: int
    outputs: int
    side: int
    normalises: bool = False
    times: int = 1

    def __str__(self) -> str:
        return f"{self.inputs} to {self.outputs} channels at {self.side}²{', normalising' * self.normalises}"


RESNET50 = (
    Layer(64, 64, 56),
    Layer(256, 64, 56, times=2),
    Layer(64, 256, 56),
    Layer(64, 256, 56, normalises=True, times=3),
    Layer(256, 128, 56),
    Layer(512, 128, 28, times=3),
    Layer(128, 512, 28, normalises=True, times=4),
    Layer(512, 256, 28),
    Layer(1024, 256, 14, times=5),
    Layer(256, 1024, 14, normalises=True, times=6),
    Layer(1024, 512, 14),
    Layer(2048, 512, 7, times=2),
    Layer(512, 2048, 7, normalises=True, times=3),
)
"""All with stride 1."""
IMAGES = 128  # of each group
CHECKED = (Layer(200, 72, 9), Layer(200, 72, 9, normalises=True))
SMALL = (Layer(24, 40, 3), Layer(24, 40, 3, normalises=True))


def products(device: torch.device) -> Iterator[Finding]:
    """Products of two groups against float64, and against themselves."""
    on_gpu = device.type == "cuda"
    for dtype in DTYPES_ON_A_GPU if on_gpu else (torch.float32, torch.float16):
        for layer in CHECKED if on_gpu else SMALL:
            arguments = drawn(layer, 16 if on_gpu else 2, dtype, device)
            found, again = (together(*arguments) for _ in range(2))
            wide = [each.double() if isinstance(each, Tensor) else each for each in arguments]
            error = max(distance(a, b) for a, b in zip(found, separately(*wide), strict=True))
            name = f"a product between norms, {layer}, {str(dtype).removeprefix('torch.')}"
            yield Finding(f"error of {name}", f"{error:.1e}", error < GATE[dtype])
            same = all(map(torch.equal, found, again))
            yield Finding(f"repeated {name}", "bitwise equal" if same else "differs", same)


def layers(device: torch.device, output: Path | None = None) -> Iterator[Finding]:
    """Times of ResNet-50's products and of what they replace; appended to device_step.jsonl in the folder `output`.

    The last finding decides on `unigrad_fast.networks.norm_convolution.TRIED`.
    """
    if device.type != "cuda":
        for layer in SMALL:
            compute(layer, 2, device)
            yield Finding(f"a product between norms, {layer}", "ran", True)
        return
    rows, sums = [], {"ours": 0.0, "cuDNN and separate passes": 0.0}
    for layer in RESNET50:
        arguments = drawn(layer, IMAGES, torch.bfloat16, device)
        runs = (lambda: together(*arguments), lambda: separately(*arguments))  # noqa: B023  both are run here
        with fastest_convolutions(device):
            taken = dict(zip(sums, (sum(kernel_milliseconds(run).values()) for run in runs), strict=True))
        for name, each in taken.items():
            sums[name] += layer.times * each
            rows.append({"what": f"a product between norms, {name}", "unit": "ms", "case": str(layer), "mean": each})
        said = ", ".join(f"{name} {1e3 * each:.1f} us" for name, each in taken.items())
        yield Finding(f"a product between norms, {layer}", said, True)
    said = ", ".join(f"{name} {each:.2f} ms" for name, each in sums.items())
    yield Finding(f"the {sum(layer.times for layer in RESNET50)} products of a target pass", said, True)
    if output is not None:
        append(output, "device_step", rows)


def drawn(layer: Layer, images: int, dtype: torch.dtype, device: torch.device) -> tuple:
    """Random arguments of a product."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device)

    x = normal(GROUPS * images, layer.side, layer.side, layer.inputs).to(dtype).permute(0, 3, 1, 2)
    matrix = normal(layer.outputs, layer.inputs) / layer.inputs**0.5
    before = (None,) * 4
    if layer.normalises:
        mean, square = (normal(GROUPS, layer.inputs) for _ in range(2))
        before = (mean, square.square() + 0.5, normal(layer.inputs), normal(layer.inputs))
    return x, matrix.to(dtype), GROUPS, *before, EPS


def together(*arguments) -> tuple[Tensor, Tensor]:
    from unigrad_fast.kernels.batch_norm_ops import norm_product

    with torch.no_grad():
        return norm_product(*arguments)


def separately(x: Tensor, matrix: Tensor, groups: int, mean, variance, weight, bias, eps: float):
    """The same by the norm's kernels and cuDNN's convolution."""
    from unigrad_fast.kernels import batch_norm_ops

    with torch.no_grad():
        if mean is not None:
            x, _ = batch_norm_ops.normalise(x, mean, variance, weight, bias, None, eps, True, False)
        y = torch.nn.functional.conv2d(x, matrix[..., None, None])
        return y, batch_norm_ops.statistics(y, groups)


def compute(layer: Layer, images: int, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> None:
    """Both, once."""
    arguments = drawn(layer, images, dtype, device)
    together(*arguments)
    separately(*arguments)
