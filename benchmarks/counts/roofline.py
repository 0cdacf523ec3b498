"""FLOPs and bytes of the objective's kernels by count, the peaks of a device, and the least time that follows.

Counted is what the design computes and moves, whoever is measured: a variant's TFLOP/s and GB/s are those counts over
its time, so that they compare. Counted FLOPs are those of matrix products; counted bytes are every array once, F and
its working copy by halves where one triangle is enough.

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
TRIES = 5  # of which the best is the peak


@dataclass(frozen=True)
class Design:
    """In which precisions (keys of DTYPES) the kernels work.

    Attributes:
        embedding: of the embeddings and of the gradient that they get.
        unit: of the unit embeddings, and so of the update's product.
        product: of the product u·F; half precision reads a working copy of F.
        block: rows of the blocks in which the upper triangle of F is computed.
    """

    embedding: str
    unit: str
    product: str
    block: int

    @classmethod
    def of(cls, precision: str, device: torch.device) -> Design:
        """What the objective does on a device: on the CPU embeddings and unit embeddings stay fp32."""
        if device.type == "cuda":
            return cls(precision, precision, precision, TRIANGLE)
        return cls("fp32", "fp32", precision, PANEL_ROWS)

    def flops(self, kernel: str, M: int, C: int) -> int:
        """FLOPs of a kernel of `launches`."""
        return {
            "unit_embeddings": 0,
            "update_correlation": M * C * (C + self.block),
            "correlation_product": 2 * M * C * C,
            "embedding_gradient": 0,
            "backward": 0,
        }[kernel]

    def bytes(self, kernel: str, M: int, C: int) -> int:
        """Bytes that a kernel of `launches` reads and writes."""
        embedding, unit, copy = (DTYPES[p].itemsize for p in (self.embedding, self.unit, self.product))
        has_copy = copy < 4
        # Half of F read and half written, and the other half too or half of the copy.
        correlation = (4 + 4 + (copy if has_copy else 4)) * C * C // 2
        return {
            "unit_embeddings": (embedding + unit) * M * C,
            "update_correlation": correlation + unit * M * C,
            "correlation_product": copy * C * C + (unit + 4) * M * C,
            "embedding_gradient": (4 + unit + unit + 4) * M * C,
            "backward": (4 + embedding) * M * C,
        }[kernel]

    def precision(self, kernel: str) -> str:
        """What a kernel's matrix product is computed in."""
        return self.product if kernel == "correlation_product" else self.unit


def launches(N: int) -> dict[str, int]:
    """The kernels of a step of two global views, and the rows that each takes."""
    return {
        "unit_embeddings": 4 * N,
        "update_correlation": 2 * N,
        "correlation_product": 2 * N,
        "embedding_gradient": 2 * N,
        "backward": 2 * N,
    }


@dataclass(frozen=True)
class Peaks:
    """What a device does at most: FLOP/s of a large matrix product by precision, bytes/s of a copy."""

    flops: dict[str, float]
    copy: float

    def least_seconds(self, design: Design, N: int, C: int) -> float:
        """The roofline: the sum over the kernels of what their FLOPs or their bytes take, whichever is more."""
        return sum(
            max(
                design.flops(kernel, M, C) / self.flops[design.precision(kernel)],
                design.bytes(kernel, M, C) / self.copy,
            )
            for kernel, M in launches(N).items()
        )


@contextlib.contextmanager
def float32_products(precision: str) -> Iterator[None]:
    """While inside, fp32 matrices are multiplied in TF32 where `precision` is "tf32", else exactly."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def measure_peaks(precisions: set[str], device: torch.device, side: int, elements: int) -> Peaks:
    """Peaks of a device.

    Args:
        precisions: keys of DTYPES.
        side: rows and columns of the matrices that are multiplied.
        elements: fp32 numbers that are copied.
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
