"""Counted FLOPs and bytes of the objective's kernels, measured peaks of a device, and the resulting roofline.

The counts are those of our design, also for other variants: a variant's TFLOP/s and GB/s are these counts divided by
its time, so that variants can be compared. FLOPs are those of matrix products; bytes count every array once, and only
half of F and of its working copy if one triangle is enough.

M: rows that a kernel takes, C: embedding width, N: images per view.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from unigrad_fast.benchmarks.harness.turns import seconds
from unigrad_fast.kernels.heuristics import TRIANGLE
from unigrad_fast.kernels.reference import PANEL_ROWS

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TRIES = 5  # the best one is the peak


@dataclass(frozen=True)
class Design:
    """The precisions (keys of DTYPES) of the kernels.

    Attributes:
        embedding: precision of the embeddings and their gradient.
        unit: precision of the unit embeddings, and so of the update's product.
        product: precision of the product u·F; in half precision it reads a working copy of F.
        block: rows of the blocks in which the upper triangle of F is computed.
    """

    embedding: str
    unit: str
    product: str
    block: int

    @classmethod
    def of(cls, precision: str, device: torch.device) -> Design:
        """The objective's design on a device: on the CPU, embeddings and unit embeddings stay fp32."""
        if device.type == "cuda":
            return cls(precision, precision, precision, TRIANGLE)
        return cls("fp32", "fp32", precision, PANEL_ROWS)

    def flops(self, kernel: str, M: int, C: int) -> int:
        """FLOPs of a kernel of `launches`."""
        products = {"update_correlation": M * C * (C + self.block), "correlation_product": 2 * M * C * C}
        return products.get(kernel, 0)

    def bytes(self, kernel: str, M: int, C: int) -> int:
        """Bytes that a kernel of `launches` reads and writes."""
        embedding, unit, copy = (DTYPES[p].itemsize for p in (self.embedding, self.unit, self.product))
        has_copy = copy < 4
        # Half of F is read and written; then the other half of F, or half of the copy, is written.
        correlation = (4 + 4 + (copy if has_copy else 4)) * C * C // 2
        return {
            "unit_embeddings": (embedding + unit) * M * C,
            "update_correlation": correlation + unit * M * C,
            "correlation_product": copy * C * C + (unit + 4) * M * C,
            "embedding_gradient": (4 + unit + unit + 4) * M * C,
            "backward": (4 + embedding) * M * C,
        }[kernel]


def launches(N: int) -> dict[str, int]:
    """The kernels of a step with two global views, and the number of rows that each processes."""
    return {
        "unit_embeddings": 4 * N,
        "update_correlation": 2 * N,
        "correlation_product": 2 * N,
        "embedding_gradient": 2 * N,
        "backward": 2 * N,
    }


@dataclass(frozen=True)
class Peaks:
    """Peaks of a device: FLOP/s of a large matrix product by precision, bytes/s of a copy."""

    flops: dict[str, float]
    copy: float

    def kernel_seconds(self, design: Design, kernel: str, M: int, C: int) -> float:
        """The roofline of a kernel in seconds: the longer of the times for its FLOPs and for its bytes."""
        flops = self.flops[design.product if kernel == "correlation_product" else design.unit]
        return max(design.flops(kernel, M, C) / flops, design.bytes(kernel, M, C) / self.copy)

    def least_seconds(self, design: Design, N: int, C: int) -> float:
        """The roofline of a step in seconds, the sum over its kernels."""
        return sum(self.kernel_seconds(design, kernel, M, C) for kernel, M in launches(N).items())


@contextlib.contextmanager
def float32_products(precision: str) -> Iterator[None]:
    """Inside, fp32 matrix products use TF32 if `precision` is "tf32", and full fp32 otherwise."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def measure_peaks(precisions: set[str], device: torch.device, side: int, elements: int) -> Peaks:
    """Measure the peaks of a device.

    Args:
        precisions: keys of DTYPES.
        side: rows and columns of the matrices to multiply.
        elements: number of fp32 values to copy.
    """
    flops = {}
    for precision in sorted(precisions):
        matrix = torch.randn(side, side, device=device).to(DTYPES[precision])
        with float32_products(precision):
            flops[precision] = 2 * side**3 / _best(lambda matrix=matrix: matrix @ matrix, device)
    source = torch.randn(elements, device=device)
    target = torch.empty_like(source)
    return Peaks(flops, 2 * 4 * elements / _best(lambda: target.copy_(source), device))


def _best(run: Callable[[], object], device: torch.device) -> float:
    run()
    return min(seconds(run, device) for _ in range(TRIES))
