"""3×3 convolutions on small feature maps: torch's against one matrix product, forward and backward, on the CPU.

    python -m unigrad_fast.benchmarks.pages.small_convolution [--output FOLDER]

Also a whole step of a ResNet-18 (target forward, online forward, backward over two views) with each. Rows are appended
to OUTPUT/small_convolution.jsonl.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import nn

from unigrad_fast.benchmarks.harness import script
from unigrad_fast.benchmarks.harness.record import OUTPUT, append, make_folder
from unigrad_fast.benchmarks.harness.turns import seconds, spread, take_turns
from unigrad_fast.config import resolve
from unigrad_fast.networks import small_convolution
from unigrad_fast.networks.encoder import Encoder
from unigrad_fast.networks.small_convolution import SmallConv2d, use_small_convolutions

REPEATS, WARMUP = 11, 2
SHAPES = ((64, 8), (128, 4), (256, 4), (256, 2), (512, 2), (512, 1))  # channels, pixels per side
IMAGES = 128
CPU = torch.device("cpu")


def convolution(module: nn.Module, channels: int, side: int, dtype: torch.dtype) -> Callable[[], None]:
    images = torch.randn(IMAGES, channels, side, side, dtype=dtype).to(memory_format=torch.channels_last)
    images.requires_grad_()

    def run() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            output = module(images)
        output.backward(output.detach())

    return run


def step(encoder: nn.Module, images: int, side: int, dtype: torch.dtype) -> Callable[[], None]:
    views = [torch.randn(images, 3, side, side).to(memory_format=torch.channels_last) for _ in range(2)]

    def run() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            with torch.no_grad():
                encoder(views)
            embeddings = encoder(views)
        torch.autograd.backward(embeddings, [torch.ones_like(z) for z in embeddings])

    return run


def row(what: str, dtype: torch.dtype, run_library: Callable[[], None], run_product: Callable[[], None]) -> dict:
    """Milliseconds of torch's convolutions and of ours, alternating in every repetition."""
    blocks = {"torch": partial(seconds, run_library, CPU), "product": partial(seconds, run_product, CPU)}
    times = take_turns(blocks, REPEATS, warmup=WARMUP)
    spreads = [spread([taken * 1e3 for taken in kept]) for kept in times.values()]
    library, product = (each["median"] for each in spreads)
    name = str(dtype).removeprefix("torch.")
    print(f"{what:42} {name:8}  torch {library:7.1f} ms   product {product:7.1f} ms   {library / product:5.2f} x")
    ranges = [round(each["most"] / each["least"], 2) for each in spreads]
    return {"what": what, "dtype": name, "torch_ms": library, "product_ms": product, "spread": ranges}


def main(output: Path = OUTPUT) -> None:
    """Measure, print the figures and append the rows.

    Args:
        output: folder of the rows.
    """
    make_folder(output)
    rows = []
    for dtype in (torch.bfloat16, torch.float32):
        limit, small_convolution.MOST_PIXELS = small_convolution.MOST_PIXELS, 10**9
        for channels, side in SHAPES:
            plain = nn.Conv2d(channels, channels, 3, padding=1, bias=False).to(memory_format=torch.channels_last)
            small = SmallConv2d(channels, channels, 3, padding=1, bias=False).to(memory_format=torch.channels_last)
            variants = [convolution(module, channels, side, dtype) for module in (plain, small)]
            rows.append(row(f"{channels} channels, {side} x {side}, {IMAGES} images", dtype, *variants))
        small_convolution.MOST_PIXELS = limit
        for images, side in ((128, 32), (64, 48)):
            settings = resolve("cifar_subset").model
            encoders = [Encoder(settings), use_small_convolutions(Encoder(settings))]
            variants = [step(e.to(memory_format=torch.channels_last), images, side, dtype) for e in encoders]
            rows.append(row(f"ResNet-18 step, {images} images, {side} px", dtype, *variants))
    print(f"rows appended to {append(output, 'small_convolution', rows)}")


if __name__ == "__main__":
    sys.exit(script.run(main))
