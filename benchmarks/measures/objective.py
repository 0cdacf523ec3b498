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
import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from unigrad_fast.benchmarks.counts.roofline import measure_peaks
from unigrad_fast.benchmarks.harness.processes import require_one_process
from unigrad_fast.benchmarks.harness.record import append, make_folder
from unigrad_fast.benchmarks.measures.objective_blocks import measure, ratio_rows
from unigrad_fast.benchmarks.peers.objective import left_out, variants
from unigrad_fast.kernels.dispatch import use_triton
from unigrad_fast.runtime.errors import UserError

WIDTHS, IMAGES = (1024, 2048, 4096, 8192, 16384), (128, 512)


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
    end: float = math.inf,
    progress: Callable[[str], None] = lambda what: None,
) -> list[dict]:
    """Measure, print the tables and append the rows.

    Args:
        device: device to measure on.
        shapes: C and N of each measurement.
        repetitions: largest number of rounds; in each, every variant runs one block.
        block_seconds: approximate seconds per block, in whole steps.
        most_seconds: limit for the rounds of one shape, but at least `timed.LEAST_ROUNDS` are run.
        compiled: whether to measure compiled variants too.
        output: folder of the rows; None writes none.
        end: time by `time.monotonic` after which no further shape is started.
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
    for C, N in itertools.takewhile(lambda _: time.monotonic() < end, shapes):
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
