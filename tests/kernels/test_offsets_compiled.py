"""What the compiler makes of the kernels' offsets, at sizes no test can allocate; needs no GPU."""

from __future__ import annotations

import re

import pytest
import triton
import triton.language as tl
from ahead_of_time import compiled
from every_kernel import PARTS, VARIANTS
from every_kernel import ROWS as TILE

from unigrad_fast.kernels.heuristics import MAX_WIDTH, NORM_KERNELS

ROWS = 2**20  # of all ranks: 8,192 images of 2 views on each of 64
POSITIONS = 2**28  # of the images of a group, on one rank
RANKS = 4096
GROUPS = 16
LARGEST = {"C": MAX_WIDTH, "R": MAX_WIDTH, "first_row": MAX_WIDTH, "stride_M": MAX_WIDTH, "stride_C": ROWS}
LARGEST |= {"K": MAX_WIDTH, "M": ROWS, "N": ROWS, "flags": ROWS, "skips": ROWS, "strides": 2**30}
LARGEST |= {"written": ROWS, "since": ROWS, "tail": MAX_WIDTH, "W": 1024, "stride_rank": 2**30, "offset": 2**30}
LARGEST |= {"rows": POSITIONS, "ranks": RANKS, "H": 2, "W": 2}  # many small images
LARGEST |= {"stride": 2 * GROUPS * (2 * MAX_WIDTH + 1)}  # of two norms in lockstep
COLUMNS = MAX_WIDTH // TILE


def overflows(code: str, programs: tuple[int, ...]) -> list[str]:
    """Lines whose integer may not fit its type at the largest sizes: magnitudes, from the arguments on.

    Args:
        programs: in each dimension of the grid.
    """
    sizes: dict[str, int] = {}
    largest = {**LARGEST, "chunk": POSITIONS // programs[0]}
    found = []
    for line in code.splitlines():
        if "tt.func" in line:
            names = re.findall(r"%([\w.]+): i(?:32|64)", line)
            sizes.update({"%" + name: largest[name.partition(".")[0]] for name in names})
        line = line.partition(" loc(")[0]
        if loop := re.search(r"scf\.for (%\w+) = \S+ to (%\w+)", line):
            sizes[loop[1]] = sizes[loop[2]]
        parsed = re.match(r'\s*(%\w+)(?::\d+)? = "?([\w.]+)"?(.*)', line)
        widths = re.findall(r"i(32|64)\b", line)
        if parsed and widths:
            name, operation, rest = parsed.groups()
            operands = [sizes[each] for each in re.findall(r"%[\w.]+", rest) if each in sizes]
            sizes[name] = magnitude(operation, operands, rest, programs)
            if sizes[name] >= 2 ** (int(widths[-1]) - 1):
                found.append(line.strip())
    return found


def magnitude(operation: str, operands: list[int], rest: str, programs: tuple[int, ...]) -> int:
    match operation:
        case "arith.muli":
            return operands[0] * operands[1]
        case "arith.addi" | "arith.subi":
            return sum(operands)
        case "arith.divsi":
            divisor = operands[1] if operands[1] in (2, PARTS, TILE) else 1  # constants; all else may be 1
            return operands[0] // divisor
        case "arith.cmpi" | "arith.sitofp" | "tt.addptr":
            return 0  # no integers
        case "arith.remsi":
            return min(operands)
        case "arith.constant":
            return abs(int(re.search(r"-?\d+", rest.replace("dense<", ""))[0]))
        case "tt.make_range":
            return int(re.search(r"end = (\d+)", rest)[1])
        case "tt.get_program_id" | "tt.get_num_programs":
            return programs["xyz".index(rest.split()[0])]
        case "arith.fptosi":
            return COLUMNS
        case "tt.load" | "tt.atomic_rmw" | "tt.reduce" | "scf.for" | "scf.if" | "arith.extui":
            return ROWS  # indices, counts and flags
        case _:
            return max(operands, default=0)


# In each dimension of the grid; the others have one program in each.
PROGRAMS = {"units": (8 * ROWS,), "tails": (1,), "gradient": (ROWS,), "gradient_in_blocks": (ROWS,)}
PROGRAMS |= dict.fromkeys(("mirror", "update", "update_of_rows"), (COLUMNS**2,))
PROGRAMS |= dict.fromkeys(("product", "product_of_triangle"), (ROWS // TILE * COLUMNS,))
PROGRAMS |= dict.fromkeys(("norm_product", "norm_product_normalising"), (2**31 - 1, GROUPS))  # as many as CUDA launches


@pytest.mark.parametrize(
    "name", [name for name, variant in VARIANTS.items() if "p_chunks" not in variant.kernel.arg_names]
)
def test_no_integer_overflows_at_the_largest_width(name, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    variant = VARIANTS[name]
    programs = PROGRAMS.get(name, (COLUMNS,))
    if variant.name in NORM_KERNELS:
        programs = (NORM_KERNELS[variant.name].programs, GROUPS, COLUMNS)
    code = variant.compiled().asm["ttir"]
    assert re.search(r"arith\.muli .*i64", code)
    assert not overflows(code, programs)


@triton.jit
def careless_kernel(p_product, C, BLOCK: tl.constexpr):
    o_C = tl.arange(0, BLOCK)
    for row in range(0, C):
        tl.store(p_product + row * C + o_C, 0.0, mask=o_C < C)


def test_an_offset_of_32_bits_is_seen(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    types = {"p_product": "*fp32", "C": "i32"}
    code = compiled(careless_kernel, 90, {"BLOCK": 1024}, types.__getitem__).asm["ttir"]
    assert any("arith.muli" in line and "i32" in line for line in overflows(code, (1,)))
