"""Finds the fastest tiles of this machine's GPU and writes them into the kernels' table.

    unigrad-fast bench kernels --tune

For each precision and each shape of `measures.objective`, every candidate runs on scratch data, never on a live F. One
that does not fit the chip is skipped; one whose result differs from plain torch's is refused and named. The table is a
file of the package: entries take effect immediately and should be committed, with the card's name in the message.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import triton
from torch import Tensor

from unigrad_fast.benchmarks.counts.roofline import DTYPES
from unigrad_fast.benchmarks.harness.turns import seconds, take_turns
from unigrad_fast.benchmarks.measures.objective import IMAGES, WIDTHS
from unigrad_fast.kernels import heuristics
from unigrad_fast.kernels.heuristics import TRIANGLE, Tile
from unigrad_fast.runtime.errors import UserError

ROUNDS, STEPS = 5, 10
ARITHMETICS = ("bf16", "tf32")  # fp16 takes bf16's tiles
GATES = {"bf16": 5e-3, "tf32": 2e-3}  # largest accepted error of the worst row


def candidates(kernel: str, precision: str) -> Iterator[Tile]:
    """Tiles worth trying; the update's are square, and the product's columns divide a block of the triangle."""
    depths = (32, 64) if precision == "bf16" else (16, 32)
    rows = (64, 128) if kernel == "update" else (64, 128, 256)
    for row, column, depth, warps, stages in itertools.product(rows, (64, TRIANGLE), depths, (4, 8, 16), (2, 3, 4, 5)):
        if kernel == "product" or row == column:
            yield Tile(row, column, depth, warps, stages)


@dataclass(frozen=True)
class Problem:
    """Scratch data of a kernel.

    Attributes:
        launch: runs the kernel with a tile and returns its results.
        expected: the result of plain torch.
        upper: whether to compare only the upper triangle.
    """

    launch: Callable[[Tile], list[Tensor]]
    expected: Tensor
    upper: bool

    def error(self, tile: Tile) -> float:
        """Relative error of the worst row: a missing tile is a large part of a row, but a small part of the whole."""
        for result in self.launch(tile):
            result.fill_(torch.nan)  # so that unwritten memory shows
        norm, errors = torch.linalg.vector_norm(self.expected, dim=-1), []
        for result in self.launch(tile):
            found = result.float().triu() if self.upper else result.float()
            errors.append((torch.linalg.vector_norm(found - self.expected, dim=-1) / norm).max())
        return torch.stack(errors).max().item()


def problem(kernel: str, precision: str, rows: int, width: int, device: torch.device) -> Problem:
    """A kernel with scratch data of a given size."""
    from unigrad_fast.kernels import correlation, gradient

    dtype = DTYPES[precision]
    unit = torch.nn.functional.normalize(torch.randn(rows, width, device=device), dim=-1).to(dtype)
    moment = unit.float().T @ unit.float() / rows
    working = None if dtype == torch.float32 else torch.zeros_like(moment, dtype=dtype)
    if kernel == "update":
        scratch, zero, count = torch.zeros_like(moment), moment.new_zeros(()), moment.new_full((), rows)
        settings = {"decay": zero, "count": count, "working": working, "input_precision": "tf32"}

        def update(tile: Tile) -> list[Tensor]:
            correlation.update_correlation_(scratch, unit, **settings, tile=tile)
            return [scratch] if working is None else [scratch, working]

        return Problem(update, moment.triu_(), upper=True)
    operand = moment if working is None else working.copy_(moment)

    def product(tile: Tile) -> list[Tensor]:
        return [gradient.correlation_product(unit, operand, input_precision="tf32", tile=tile)]

    return Problem(product, unit.float() @ operand.float(), upper=False)


def fastest(kernel: str, precision: str, rows: int, width: int, report: Callable[[str], None]) -> Tile:
    """The candidate with the lowest median time among those with correct results; candidates take turns."""
    device = torch.device("cuda")
    scratch = problem(kernel, precision, rows, width, device)
    blocks: dict[Tile, Callable[[], float]] = {}
    for tile in candidates(kernel, precision):
        with contextlib.suppress(triton.TritonError, RuntimeError):
            error = scratch.error(tile)
            if not error < GATES[precision]:
                report(f"{kernel}, {precision}, C = {width}, M = {rows}: {tile} is refused, its error is {error:.1e}")
                continue
            blocks[tile] = partial(seconds, partial(scratch.launch, tile), device, STEPS)
    if not blocks:
        raise RuntimeError(f"no tile of {kernel} in {precision} compiles for this card and agrees with torch")
    times = take_turns(blocks, ROUNDS)
    return min(times, key=lambda tile: statistics.median(times[tile]))


def entries(kernel: str, precision: str, report: Callable[[str], None]) -> list[dict]:
    """The table's entries for a kernel and a precision."""
    found: list[dict] = []
    for number, width in enumerate(WIDTHS):
        for place, images in enumerate(IMAGES):
            tile = fastest(kernel, precision, 2 * images, width, report)
            report(f"{kernel}, {precision}, C = {width}, M = {2 * images}: {tile}")
            shape = [tile.rows, tile.columns, tile.depth, tile.warps, tile.stages]
            # The smallest shapes also apply to all smaller ones.
            found.append({"width": width if number else 0, "rows": 2 * images if place else 0, "tile": shape})
    return found


def main(report: Callable[[str], None] = print) -> None:
    """Measure and rewrite the table's entries for this architecture."""
    if not torch.cuda.is_available():
        raise UserError("--tune needs a GPU, and this machine has none that torch can use")
    arch = heuristics.architecture(torch.cuda.get_device_capability())
    table = json.loads(heuristics.TABLE.read_text(encoding="utf-8"))
    for kernel, precision in itertools.product(("update", "product"), ARITHMETICS):
        kind = heuristics.arithmetic(DTYPES[precision], "tf32")
        table[kernel][arch][kind] = entries(kernel, precision, report)
        heuristics.TABLE.write_text(rendered(table), encoding="utf-8")
    report(f"wrote {heuristics.TABLE}")


def rendered(table: dict) -> str:
    """The table as JSON with one line per entry."""
    text = json.dumps(table, indent=2)
    for kernels in table.values():
        for kinds in kernels.values():
            for entry in itertools.chain.from_iterable(kinds.values()):
                text = text.replace(json.dumps(entry, indent=2).replace("\n", "\n" + " " * 8), json.dumps(entry))
    return text + "\n"
