"""What the compiler makes of the kernels' offsets, at sizes no test can allocate; needs no GPU."""

from __future__ import annotations

import importlib.util
import os
import re

import pytest

if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("needs Triton's compiler: Triton installed, its interpreter off", allow_module_level=True)

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from unigrad_fast.kernels.correlation import mirror_kernel, update_correlation_kernel
from unigrad_fast.kernels.gradient import correlation_product_kernel, embedding_gradient_kernel
from unigrad_fast.kernels.heuristics import MAX_WIDTH
from unigrad_fast.kernels.normalize import unit_embeddings_kernel
from unigrad_fast.kernels.tails import sum_tails_kernel

ROWS = 2**20  # of all ranks: 8,192 images of 2 views on each of 64
TILE = 64
LARGEST = {"C": MAX_WIDTH, "R": MAX_WIDTH, "first_row": MAX_WIDTH, "stride_M": MAX_WIDTH, "stride_C": ROWS}
LARGEST |= {"M": ROWS, "N": ROWS, "flags": ROWS, "skips": ROWS, "strides": 2**30}
LARGEST |= {"written": ROWS, "since": ROWS, "tail": MAX_WIDTH, "W": 1024, "stride_rank": 2**30, "offset": 2**30}
POINTERS = {f"p_{name}": "*bf16" for name in ("unit", "target", "working", "gradient", "tail", "gathered")}
POINTERS |= {f"p_{name}": "*i64" for name in ("first", "second", "updates")}
POINTERS |= {f"p_{name}": "*i32" for name in ("nonfinite", "skip", "ticket", "raised", "flags")}
NAMES = ("inverse_norm", "correlation", "product", "decay", "count", "ratio", "cosine", "negative", "terms")
POINTERS |= {f"p_{name}": "*fp32" for name in NAMES}
VIEWS = {"p_views": ("*fp32", "*bf16"), "strides": ("i32", "i32")}
UPDATE = {"WORKING": True, "TRIANGLE": 128, "PRECISION": "ieee", "BLOCK": TILE, "DEPTH": TILE}
PRODUCT = {"PRECISION": "ieee", "ROWS": TILE, "COLUMNS": TILE, "DEPTH": TILE}
COLUMNS = MAX_WIDTH // TILE


def intermediate(kernel, constants: dict, types: dict) -> str:
    """The kernel in Triton's intermediate representation."""
    integers = dict.fromkeys(LARGEST, "i32")
    signature = {name: ({**integers, **POINTERS, **types}).get(name, "fp32") for name in kernel.arg_names}
    signature.update(dict.fromkeys(constants, "constexpr"))
    return triton.compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", 90, 32)).asm["ttir"]


def overflows(code: str, programs: int) -> list[str]:
    """Lines whose integer may not fit its type at the largest sizes: magnitudes, from the arguments on."""
    sizes: dict[str, int] = {}
    found = []
    for line in code.splitlines():
        if "tt.func" in line:
            names = re.findall(r"%([\w.]+): i(?:32|64)", line)
            sizes.update({"%" + name: LARGEST[name.partition(".")[0]] for name in names})
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


def magnitude(operation: str, operands: list[int], rest: str, programs: int) -> int:
    match operation:
        case "arith.muli":
            return operands[0] * operands[1]
        case "arith.addi" | "arith.subi":
            return sum(operands)
        case "arith.divsi":
            divisor = operands[1] if operands[1] in (2, TILE) else 1  # constants; all else may be 1
            return operands[0] // divisor
        case "arith.cmpi" | "tt.addptr":
            return 0  # no integers
        case "arith.remsi":
            return min(operands)
        case "arith.constant":
            return abs(int(re.search(r"-?\d+", rest.replace("dense<", ""))[0]))
        case "tt.make_range":
            return int(re.search(r"end = (\d+)", rest)[1])
        case "tt.get_program_id":
            return programs
        case "arith.fptosi":
            return COLUMNS
        case "tt.load" | "tt.atomic_rmw" | "tt.reduce" | "scf.for" | "scf.if" | "arith.extui":
            return ROWS  # indices, counts and flags
        case _:
            return max(operands, default=0)


@pytest.mark.parametrize(
    ("kernel", "constants", "programs"),
    [
        pytest.param(
            unit_embeddings_kernel, {"SMALLEST_NORM": 1e-12, "DIGIT": 256, "BLOCK": 1024}, 8 * ROWS, id="units"
        ),
        pytest.param(sum_tails_kernel, {"DIGIT": 256, "BLOCK": 128}, 1, id="tails"),
        pytest.param(mirror_kernel, {"BLOCK": TILE}, COLUMNS**2, id="mirror"),
        pytest.param(update_correlation_kernel, {**UPDATE, "SYMMETRIC": True}, COLUMNS**2, id="update"),
        pytest.param(update_correlation_kernel, {**UPDATE, "SYMMETRIC": False}, COLUMNS**2, id="update_of_rows"),
        pytest.param(correlation_product_kernel, {**PRODUCT, "TRIANGLE": False}, ROWS // TILE * COLUMNS, id="product"),
        pytest.param(
            correlation_product_kernel, {**PRODUCT, "TRIANGLE": True}, ROWS // TILE * COLUMNS, id="product_of_triangle"
        ),
        pytest.param(embedding_gradient_kernel, {"WHOLE_ROW": True, "BLOCK": 1024}, ROWS, id="gradient"),
        pytest.param(embedding_gradient_kernel, {"WHOLE_ROW": False, "BLOCK": 1024}, ROWS, id="gradient_in_blocks"),
    ],
)
def test_no_integer_overflows_at_the_largest_width(kernel, constants, programs, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    is_product = kernel is correlation_product_kernel
    types = {"p_correlation": "*bf16"} if is_product else VIEWS if kernel is unit_embeddings_kernel else {}
    code = intermediate(kernel, constants, types)
    assert re.search(r"arith\.muli .*i64", code)
    assert not overflows(code, programs)


@triton.jit
def careless_kernel(p_product, C, BLOCK: tl.constexpr):
    o_C = tl.arange(0, BLOCK)
    for row in range(0, C):
        tl.store(p_product + row * C + o_C, 0.0, mask=o_C < C)


def test_an_offset_of_32_bits_is_seen(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    code = intermediate(careless_kernel, {"BLOCK": 1024}, {})
    assert any("arith.muli" in line and "i32" in line for line in overflows(code, 1))
