"""Tile shapes by kernel, architecture, arithmetic and size, read from a table; there is no search at run time.

`tiles.json` holds one list per kernel, architecture and arithmetic, ordered from small problems to large ones. The last
entry whose `width` and `rows` the problem reaches is used, so that all ranks use the same one. Measured entries are
written by `unigrad-fast bench kernels --tune`, which works on scratch data.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import torch
from torch import Tensor

from .batch_norm_reference import WORD

TABLE = Path(__file__).with_name("tiles.json")
TRIANGLE = 128  # rows and columns of the blocks that make up F's upper triangle; whole on the diagonal
MAX_WIDTH = 65536  # a row of unit embeddings must fit into the registers of one program
WHOLE_ROW = 16384  # channels up to which three arrays fit
HALF = (torch.bfloat16, torch.float16)
REGISTERS = 65536  # of a multiprocessor


@dataclass(frozen=True)
class Tile:
    """Shape of a tile of the result, depth of one step of the product, warps per program, pipeline stages."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


def blocks(size: int, block: int) -> int:
    """Number of blocks that cover `size` elements; `triton.cdiv` would take the host 4 µs."""
    return -(-size // block)


@cache
def row_tile(width: int, arrays: int = 1) -> tuple[int, int]:
    """For a kernel with one program per row that holds `arrays` arrays of it: channels held at once, and warps."""
    block = max(16, 1 << (width - 1).bit_length())
    if arrays > 1 and block > WHOLE_ROW:
        block = 4096
    return block, min(16, max(1, block // 1024) if arrays == 1 else max(1, block // 512))


def arithmetic(dtype: torch.dtype, input_precision: str) -> str:
    """Name in the table: "half" for bf16 and fp16, else the precision that fp32 operands are multiplied in."""
    return "half" if dtype in HALF else input_precision


def architecture(capability: tuple[int, int]) -> str:
    """Name in the table, which depends on matrix instructions and shared memory.

    Consumer cards (8.6, 8.9, 12.x) have the matrix instructions of 8.0, but only 99 KiB of shared memory.
    """
    return {9: "90", 10: "100"}.get(capability[0], "80" if capability == (8, 0) else "86")


@cache
def tiles(kernel: str, arch: str, kind: str) -> tuple[tuple[int, int, Tile], ...]:
    """The table's entries (minimum width, minimum rows, tile)."""
    entries = json.loads(TABLE.read_text(encoding="utf-8"))[kernel][arch][kind]
    return tuple((entry["width"], entry["rows"], Tile(*entry["tile"])) for entry in entries)


def tile_for(kernel: str, unit_MC: Tensor, input_precision: str) -> Tile:
    """The tile of kernel "update" or "product" for unit embeddings [M, C] on their device."""
    rows, width = unit_MC.shape
    return choose(kernel, architecture_of(unit_MC.device), arithmetic(unit_MC.dtype, input_precision), rows, width)


@cache
def architecture_of(device: torch.device) -> str:
    """The name of a device's architecture in the table."""
    # The interpreter has no architecture; its tiles are small, so that tests cover more tile borders.
    return architecture(torch.cuda.get_device_capability(device)) if device.type == "cuda" else "interpreter"


@cache
def choose(kernel: str, arch: str, kind: str, rows: int, width: int) -> Tile:
    """The last entry whose width and rows the problem reaches."""
    return [tile for w, m, tile in tiles(kernel, arch, kind) if width >= w and rows >= m][-1]


def working_scale(dtype: torch.dtype, width: int) -> float:
    """Power of two that a working copy of F is multiplied by.

    Entries of F are about 1/C, and its diagonal sums to 1. In fp16 most entries would lose bits, but C times as large
    they fit. bf16 needs no scale because it has the exponent range of fp32.
    """
    return 2.0 ** min(15, width.bit_length() - 1) if dtype == torch.float16 else 1.0


@dataclass(frozen=True)
class NormKernel:
    """How one of batch norm's kernels runs.

    Attributes:
        programs: about so many.
        elements, columns: of a tile of one tensor; each thread holds 8 adjacent channels, 128 bits in bf16.
        warps: per program.
        registers: at most so many per thread, a multiple of 8; the compiler is told, and in bf16 needs no more.
        parts: results of chunks that one program merges at a time; 0: there is nothing to merge.
    """

    programs: int
    elements: int
    columns: int
    warps: int
    registers: int
    parts: int = 0

    @property
    def resident(self) -> int:
        """Programs that fit on a multiprocessor at a time."""
        return REGISTERS // (32 * self.warps * self.registers)

    @cached_property
    def options(self) -> dict[str, int]:
        """Options of its launch."""
        return {"num_warps": self.warps, "maxnreg": self.registers}


NORM_KERNELS = {
    "statistics": NormKernel(1024, 4096, 64, warps=8, registers=80, parts=32),
    "normalise": NormKernel(4096, 2048, 128, warps=4, registers=96),
    "pool": NormKernel(4096, 1024, 64, warps=4, registers=96),
    "sums": NormKernel(1024, 2048, 64, warps=8, registers=72, parts=32),
    "sums_pool": NormKernel(1024, 2048, 64, warps=8, registers=96, parts=32),  # from the gradient after `pool`
    "gradient": NormKernel(4096, 2048, 128, warps=4, registers=96),
    "gradient_pool": NormKernel(4096, 1024, 64, warps=4, registers=96),
}


@dataclass(frozen=True)
class Cut:
    """How batch norm's rows are cut: rows and columns per tile, rows per chunk, the grid (chunks, groups, blocks of
    channels), and how many bunches of chunks are merged first."""

    rows: int
    columns: int
    chunk: int
    grid: tuple[int, int, int]
    bunches: int

    @property
    def levels(self) -> int:
        """How often results are merged one after the other."""
        return 0 if not self.bunches else 1 if self.bunches == 1 else 2


@cache
def cut(rows: int, groups: int, channels: int, kernel: NormKernel) -> Cut:
    """The cut of `rows` rows per group for one of batch norm's kernels."""
    columns = min(kernel.columns, max(WORD, 1 << (channels - 1).bit_length()))
    tile_rows = kernel.elements // columns
    of_channels = blocks(channels, columns)
    chunks = max(1, min(kernel.programs // (groups * of_channels), blocks(rows, tile_rows)))
    if kernel.parts:  # merged twice, each time in one go
        chunks = min(chunks, kernel.parts**2)
    chunk = blocks(blocks(rows, chunks), tile_rows) * tile_rows
    chunks = blocks(rows, chunk)
    bunches = blocks(chunks, kernel.parts) if kernel.parts else 0
    return Cut(tile_rows, columns, chunk, (chunks, groups, of_channels), bunches)


@dataclass(frozen=True)
class NormProduct:
    """How the product between two norms runs.

    Attributes:
        tile: of the result, its rows and channels.
        registers: at most so many per thread; the compiler is told.
        bunch: results of tiles that one program merges, before all bunches are merged; parts: so many at a time.
    """

    tile: Tile
    registers: int
    bunch: int = 64
    parts: int = 16

    @property
    def resident(self) -> int:
        """Programs that fit on a multiprocessor at a time."""
        return REGISTERS // (32 * self.tile.warps * self.registers)

    @cached_property
    def options(self) -> dict[str, int]:
        """Options of its launch."""
        return {"num_warps": self.tile.warps, "num_stages": self.tile.stages, "maxnreg": self.registers}


# By architecture, and whether the product normalises its input, which takes registers; in bf16 none is spilled. The
# matrix units of 9.0 take larger tiles, of which those that normalise are less deep.
NORM_PRODUCTS = {
    ("90", False): NormProduct(Tile(128, 128, 64, warps=8, stages=3), registers=128),
    ("90", True): NormProduct(Tile(128, 128, 32, warps=8, stages=4), registers=128),
    ("interpreter", False): NormProduct(Tile(16, 32, 16, warps=4, stages=1), registers=128, bunch=8, parts=4),
    ("interpreter", True): NormProduct(Tile(16, 32, 16, warps=4, stages=1), registers=128, bunch=8, parts=4),
}
OTHER_NORM_PRODUCTS = NormProduct(Tile(64, 128, 32, warps=4, stages=3), registers=168)


def norm_product_for(arch: str, normalises: bool) -> NormProduct:
    """How the product between two norms runs on an architecture."""
    return NORM_PRODUCTS.get((arch, normalises), OTHER_NORM_PRODUCTS)


def norm_product_on(device: torch.device, normalises: bool) -> NormProduct:
    """How it runs on a device."""
    return norm_product_for(architecture_of(device), normalises)


@cache
def tiled(rows: int, groups: int, channels: int, product: NormProduct) -> Cut:
    """The tiles of a product of `rows` rows per group."""
    tile = product.tile
    columns = min(tile.columns, max(tile.columns // 2, 1 << (channels - 1).bit_length()))
    chunks = blocks(rows, tile.rows)
    grid = (chunks, groups, blocks(channels, columns))
    return Cut(tile.rows, columns, tile.rows, grid, blocks(chunks, product.bunch))
