"""Measures variants of the objective on the same embeddings: time, taking turns block by block, memory and error."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from unigrad_fast.benchmarks.counts.roofline import DTYPES, Peaks, launches
from unigrad_fast.benchmarks.harness.timed import Timed, time_in_turns
from unigrad_fast.benchmarks.harness.turns import distance, ratio_row, spread
from unigrad_fast.benchmarks.peers.objective import (
    BALANCE,
    KINDS,
    Authors,
    Ours,
    PlainTorch,
    Variant,
    Views,
    release,
)

EXACTNESS = ("fp32", "tf32", "fp16", "bf16")  # most exact first


def draw_embeddings(images: int, width: int, device: torch.device, dtype: torch.dtype) -> tuple[Views, Views]:
    """Online embeddings of two views, requiring gradients, and target embeddings: correlated, unit variance, [N, C]."""
    generator = torch.Generator().manual_seed(0)
    image_NC = torch.randn(images, width, generator=generator)
    noise = (torch.randn(images, width, generator=generator) for _ in range(4))
    views = [((image_NC + noise_NC) / 2**0.5).to(device, dtype) for noise_NC in noise]
    return [z.requires_grad_() for z in views[:2]], views[2:]


def exact_gradient(online: Views, target: Views) -> Tensor:
    """dz [2·N, C] in float64 if F is this batch's correlation, as after any number of identical batches.

    u·F is computed as (u·mᵀ)·m / (2·N), without a C×C matrix.
    """
    z = torch.cat([*online]).detach().double()
    norm = torch.linalg.vector_norm(z, dim=-1, keepdim=True)
    unit, targets = z / norm, F.normalize(torch.cat([*target]).double(), dim=-1)
    gradient = BALANCE * (unit @ targets.T) @ targets / len(targets) - targets.roll(len(online[0]), 0)
    along = torch.linalg.vecdot(unit, gradient).unsqueeze(-1)
    return (gradient - unit * along) / (norm * len(unit))


def gradient_error(online: Views, target: Views) -> float:
    """Relative error norm of the online embeddings' gradients against float64."""
    return distance(torch.cat([z.grad for z in online]), exact_gradient(online, target))


class Measured(Timed):
    """A variant with its embeddings, and its results: `milliseconds`, one per round, or why it `failed`."""

    def __init__(self, variant: Variant, images: int, width: int):
        self.variant, self.images, self.width = variant, images, width
        self.views = views = draw_embeddings(images, width, variant.device, DTYPES[variant.design.embedding])
        # These closures must not hold `self`: a cycle would keep it, and an F, alive until garbage collection.
        super().__init__(str(variant), lambda: variant.step(*views), lambda: release(views[0]), variant.device)
        self.error = self.correlation_bytes = self.failed = None

    def prepare(self, block_seconds: float) -> None:
        """Warm up, measure memory and error, and choose the number of steps per block."""
        try:
            self.take_memory()
        except Exception as problem:
            if not self.variant.may_fail:
                raise
            self.failed = f"{type(problem).__name__}: {str(problem).strip().splitlines()[0]}"
            return
        self.error = gradient_error(*self.views)
        self.correlation_bytes = self.variant.correlation_bytes()
        self.plan_block(block_seconds)

    def row(self, peaks: Peaks) -> dict:
        row = {"what": str(self), "unit": "ms", "failed": self.failed}
        times = spread(self.milliseconds) if self.milliseconds else dict.fromkeys(("median", "least", "most"))
        row |= {**times, "tflops": None, "gb_per_s": None, "roofline_share": None}
        if self.milliseconds:
            design, took = self.variant.design, row["median"] / 1e3
            kernels = launches(self.images).items()
            row["tflops"] = sum(design.flops(kernel, M, self.width) for kernel, M in kernels) / took / 1e12
            row["gb_per_s"] = sum(design.bytes(kernel, M, self.width) for kernel, M in kernels) / took / 1e9
            row["roofline_share"] = peaks.least_seconds(design, self.images, self.width) / took
        return row | {
            "memory_nc": self.memory and self.memory / (4 * self.images * self.width),
            "correlation_bytes": self.correlation_bytes,
            "gradient_error": self.error,
        }


def measure(
    chosen: Sequence[Variant],
    images: int,
    width: int,
    repetitions: int,
    block_seconds: float,
    most_seconds: float,
    report: Callable[[str], None],
) -> list[Measured]:
    """Measure all variants in turns; fewer rounds than `repetitions` if they would exceed `most_seconds`."""
    shape = f"C = {width}, N = {images}"
    measured = [Measured(variant, images, width) for variant in chosen]
    for each in measured:
        report(f"{shape}: preparing {each}")
        each.prepare(block_seconds)
    working = [each for each in measured if each.failed is None]
    time_in_turns(working, repetitions, most_seconds, lambda what: report(f"{shape}: {what}"))
    return measured


def ratio_rows(measured: Sequence[Measured]) -> list[dict]:
    """Speed of ours relative to others, one ratio per round: median, least and most.

    Ours in each precision is compared with the authors' in the same one (or in fp32), with the fastest plain-torch
    variant that is at least as exact, and with ours in fp32.
    """
    of = {kind: [each for each in measured if each.milliseconds and isinstance(each.variant, kind)] for kind in KINDS}
    rows = []

    def compare(ours: Measured, other: Measured, against: str) -> None:
        rows.append(ratio_row(f"{ours} / {other}", other.milliseconds, ours.milliseconds, against=against))

    authors = {each.variant.precision: each for each in of[Authors]}
    for ours in of[Ours]:
        precision = ours.variant.precision
        compare(ours, authors.get(precision, authors["fp32"]), "authors")
        exact = EXACTNESS[: EXACTNESS.index(precision) + 1]
        plain = [each for each in of[PlainTorch] if each.variant.precision in exact]
        compare(ours, min(plain, key=lambda each: statistics.median(each.milliseconds)), "best of torch")
        if precision != "fp32":
            compare(ours, of[Ours][0], "ours in fp32")
    return rows
