"""Speed and memory of only the objective, forward and backward, against plain torch and against the roofline.

    unigrad-fast bench kernels [--width C] [--images N] [--output FOLDER]

    authors          the authors' formulation: whole-matrix expressions and autograd; under autocast, as published, F is
                     in half precision too
    torch            optimised plain torch: F updated by one in-place product over both views, the gradient by hand
    torch lerp       the same with bf16 operands and fp32 results: a product, then `lerp_`; on a GPU only
    torch addmm      the same as one product that adds bf16 operands into F in fp32; on a GPU only
    ours             `UniGrad`; on the CPU also with the product u·F in bf16, if the processor supports it

The torch variants are measured both eager and compiled. All use the same embeddings of two views and take turns, one
block of steps each per round. A row has milliseconds per step; TFLOP/s and GB/s, from the counts of our design
(`roofline.Design`) for the variant's precision; the share of that design's roofline, with peaks measured in the same
run; the peak memory of a step beyond what it starts with, including gradients, in fp32 elements per N·C (8 are the
gradients and three more tensors of their size); the bytes of F and its copies, which are persistent; and the gradient's
relative error against float64. Rows are appended to OUTPUT/objective.jsonl.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from unigrad_fast.benchmarks.counts.roofline import DTYPES, Peaks, launches, measure_peaks
from unigrad_fast.benchmarks.harness.processes import require_one_process
from unigrad_fast.benchmarks.harness.record import append, make_folder
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
    left_out,
    release,
    variants,
)
from unigrad_fast.kernels.dispatch import use_triton
from unigrad_fast.runtime.errors import UserError

WIDTHS, IMAGES = (1024, 2048, 4096, 8192, 16384), (128, 512)
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


def lines(title: str, rows: list[dict]) -> list[str]:
    """A table of measurements, and the ratios below it."""
    cells = [["", "ms", "range", "TFLOP/s", "GB/s", "limit", "N·C", "F, MiB", "error"]]
    notes = []
    for row in rows:
        if row["unit"] == "ratio":
            notes.append(f"{row['what']}: {row['median']:.2f} ({row['least']:.2f} to {row['most']:.2f})")
        elif row["failed"]:
            notes.append(f"{row['what']} failed: {row['failed']}")
        else:
            median, least, most = (digits(row[key]) for key in ("median", "least", "most"))
            rates = [digits(row["tflops"]), digits(row["gb_per_s"]), f"{row['roofline_share']:.0%}"]
            space = [f"{row['memory_nc']:.2f}", f"{row['correlation_bytes'] / 2**20:.0f}"]
            cells.append([row["what"], median, f"{least}–{most}", *rates, *space, f"{row['gradient_error']:.0e}"])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    table = [
        "  ".join([first.ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(rest, widths[1:], strict=True))])
        for first, *rest in cells
    ]
    return ["", title, *table, *notes]


def digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def bench(
    device: torch.device,
    shapes: Iterable[tuple[int, int]],
    *,
    repetitions: int = 11,
    block_seconds: float = 0.2,
    most_seconds: float = 20.0,
    compiled: bool = True,
    output: Path | None = None,
    progress: Callable[[str], None] = lambda what: None,
) -> list[dict]:
    """Measure, print the tables and append the rows.

    Args:
        device: device to measure on.
        shapes: C and N of each measurement; the next is asked for when the previous one is done.
        repetitions: largest number of rounds; in each, every variant runs one block.
        block_seconds: approximate seconds per block, in whole steps.
        most_seconds: limit for the rounds of one shape, but at least `timed.LEAST_ROUNDS` are run.
        compiled: whether to measure compiled variants too.
        output: folder of the rows; None writes none.
        progress: called with a description of the current activity.

    Returns:
        The rows.
    """
    progress("measuring the peaks")
    rows: list[dict] = []
    precisions = {variant.precision for variant in variants(1, device, False)}
    side, elements = (8192, 2**28) if device.type == "cuda" else (2048, 2**26)
    peaks = measure_peaks(precisions, device, side, elements)
    products = ", ".join(f"{flops / 1e12:.3g} TFLOP/s {precision}" for precision, flops in peaks.flops.items())
    print(f"peaks: {products}; copy {peaks.copy / 1e9:.3g} GB/s", flush=True)
    if missing := left_out(device):
        print(f"not measured, because fp32 results of bf16 matrices need a GPU with bf16: {', '.join(missing)}")
    print("limit: share of the roofline; N·C: peak memory beyond F in fp32 arrays of that size; F: with its copies")
    for C, N in shapes:
        torch.compiler.reset()  # torch.compile gives up after a number of shapes
        measured = measure(variants(C, device, compiled), N, C, repetitions, block_seconds, most_seconds, progress)
        setting = {
            "width": C,
            "images": N,
            "device": device.type,
            "threads": torch.get_num_threads(),
            "rounds": max(len(each.milliseconds) for each in measured),
            "peak_tflops": {precision: flops / 1e12 for precision, flops in peaks.flops.items()},
            "peak_gb_per_s": peaks.copy / 1e9,
        }
        found = [{**setting, **row} for row in (*(each.row(peaks) for each in measured), *ratio_rows(measured))]
        del measured  # frees every variant's F before the next ones are made
        print("\n".join(lines(f"C = {C}, N = {N}", found)), flush=True)
        rows += found
        if output is not None:
            path = append(output, "objective", found)
    if output is not None and rows:
        print(f"rows appended to {path}")
    return rows


def main(width: int | None, images: int | None, output: Path, **settings) -> None:
    """`bench` on this machine's device, with the options of `unigrad-fast bench kernels`.

    Raises:
        UserError: the environment says that this is one of several processes; `output` is a file.
    """
    require_one_process("bench kernels", "measures one process")
    shapes = itertools.product([width] if width else WIDTHS, [images] if images else IMAGES)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        use_triton(device)
    except ValueError as error:
        raise UserError(str(error)) from None
    make_folder(output)
    from rich.console import Console  # here, so that `bench` needs only torch and Triton

    with Console().status("starting") as status:
        bench(device, shapes, output=output, progress=status.update, **settings)
