"""Compiles the kernels for GPUs that need not be present, and reports the result.

    unigrad-fast bench kernels --compile_only true [--output FOLDER]

Every kernel is compiled through its launcher: the launchers run on meta tensors, and a launch ends after compilation.
So tiles, constants and Triton's specialisation of each argument are those of training.

Registers and stack come from the binary; stack means spilled registers. Memory accesses and matrix instructions are
counted in PTX, each access at the load or store in the source that it belongs to.
"""

from __future__ import annotations

import ast
import csv
import multiprocessing
import os
import re
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from unigrad_fast.benchmarks.harness.record import make_folder
from unigrad_fast.kernels import heuristics
from unigrad_fast.runtime.console import new_console
from unigrad_fast.runtime.errors import RunStopped, UserError

# Triton is imported only in the worker processes, where its interpreter is off.

# KiB available to a program, by compute capability (90 is 9.0): "Maximum amount of shared memory per thread block" in
# the CUDA Programming Guide's table of compute capabilities.
SHARED_MEMORY = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
ARCHITECTURES = tuple(SHARED_MEMORY)
MATRIX_INSTRUCTION = dict.fromkeys(ARCHITECTURES, "mma.sync") | {90: "wgmma.mma_async", 100: "tcgen05.mma"}
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
WIDTHS = tuple(2**power for power in range(7, 15))
LONG_ROW = 2 * heuristics.WHOLE_ROW
ODD_WIDTHS = (2047, LONG_ROW - 1)  # without any divisibility
# Pointers to blocks that a whole launch reads only once: flags of rows, terms of the objective, sums of chunks.
SMALL = {"p_flags", "p_cosine", "p_negative", "p_sums"}


@dataclass(frozen=True)
class Case:
    """A launch: kernel, architecture (90 is sm_90), precision, and shape [rows, width] of the unit embeddings."""

    kernel: str
    variant: str
    architecture: int
    arithmetic: str
    rows: int
    width: int

    @property
    def dtype(self) -> torch.dtype:
        return HALF.get(self.arithmetic, torch.float32)


@dataclass(frozen=True)
class Row:
    """A compiled kernel; one launch may have several. Stack and shared memory in bytes."""

    case: Case
    name: str
    tile: str
    warps: int
    stages: int
    registers: int
    stack: int
    shared: int
    instructions: dict[str, int]
    widths: dict[str, dict[int, int]]
    """By pointer, the number of accesses to its blocks, by width in bits; without scalars and `SMALL`."""
    error: str = ""

    @property
    def wide(self) -> float:
        """Share of the accesses that are 128 bits wide."""
        counts = [(bits, count) for accesses in self.widths.values() for bits, count in accesses.items()]
        return sum(count for bits, count in counts if bits >= 128) / max(1, sum(count for _, count in counts))


def dot_cases(architectures: Iterable[int] = ARCHITECTURES) -> Iterator[Case]:
    """Both matrix products at every tile of the table."""
    variants = {
        "update": (("working copy", "no copy", "rows, working copy", "rows"), ("no copy", "rows")),
        "product": (("working copy", "rows, working copy", "no copy"), ("no copy",)),
    }
    for kernel, (of_half, of_fp32) in variants.items():
        for architecture in architectures:
            for arithmetic in (*HALF, "tf32", "tf32x3", "ieee"):
                kind, chosen = ("half", of_half) if arithmetic in HALF else (arithmetic, of_fp32)
                for rows, width in problems(kernel, table_name(architecture), kind):
                    for variant in chosen:
                        yield Case(kernel, variant, architecture, arithmetic, rows, width)
                    yield Case(kernel, chosen[0], architecture, arithmetic, rows, width + 1)


def table_name(architecture: int) -> str:
    """The architecture whose tiles the table has for this one."""
    return heuristics.architecture(divmod(architecture, 10))


def problems(kernel: str, arch: str, kind: str) -> list[tuple[int, int]]:
    """The smallest (rows, width) for which each tile of the table is chosen."""
    found = {}
    for least_width, least_rows, tile in heuristics.tiles(kernel, arch, kind):
        rows, width = least_rows or 128, least_width or 1024
        assert heuristics.choose(kernel, arch, kind, rows, width) == tile, (
            f"{kernel} {arch} {kind} {tile} is never taken"
        )
        found.setdefault(tile, (rows, width))
    return list(found.values())


def row_cases(architectures: Iterable[int] = ARCHITECTURES) -> Iterator[Case]:
    """Kernels with one program per row, and multi-tensor kernels."""
    for architecture in architectures:
        for arithmetic in ("bf16", "fp32"):  # fp16 differs from bf16 only in the conversion
            for width in (*WIDTHS, LONG_ROW, *ODD_WIDTHS):
                for variant in ("one positive", "pair of positives"):
                    yield Case("embedding_gradient", variant, architecture, arithmetic, 512, width)
                for variant in ("4 views", "10 views"):
                    yield Case("unit_embeddings", variant, architecture, arithmetic, 512, width)
        for kernel, variant in (("target", ""), ("target", "bf16 copy"), ("lars", "trust ratio"), ("lars", "")):
            yield Case(kernel, variant, architecture, "fp32", 1, 4096)


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def launch(case: Case) -> None:
    """Call the launcher with the arguments that training would pass."""
    from unigrad_fast.kernels import correlation, gradient, multi_tensor, normalize

    precision = case.arithmetic if case.dtype == torch.float32 else "tf32"
    unit_MC, flags = empty(case.rows, case.width, dtype=case.dtype), empty(case.rows, dtype=torch.int32)
    updates, index_M = empty(dtype=torch.int64), empty(case.rows, dtype=torch.int64)
    first_row = heuristics.TRIANGLE if case.variant.startswith("rows") else 0
    correlation_RC = empty(case.width - first_row, case.width)
    working_RC = correlation_RC.to(case.dtype) if "working copy" in case.variant else None
    if case.kernel == "update":
        correlation.update_correlation_(
            correlation_RC,
            unit_MC,
            decay=empty(),
            count=empty(),
            skip=flags[0],
            updates=updates,
            first_row=first_row,
            working=working_RC,
            input_precision=precision,
        )
    elif case.kernel == "product":
        operand = correlation_RC if working_RC is None else working_RC
        gradient.correlation_product(unit_MC, operand, input_precision=precision)
    elif case.kernel == "embedding_gradient":
        second, ratio = (index_M, empty(case.rows)) if case.variant.startswith("pair") else (None, None)
        gradient.embedding_gradient(
            empty(case.rows, case.width),
            gradient_MC=unit_MC,
            unit_MC=unit_MC,
            inverse_norm_M=empty(case.rows),
            target_KC=unit_MC,
            first=index_M,
            second=second,
            ratio=ratio,
            nonfinite=flags,
            skip=flags,
            updates=updates,
            ticket=empty(dtype=torch.int32),
            balance=100.0,
            scale=1.0 / case.rows,
        )
    elif case.kernel == "unit_embeddings":
        views = [unit_MC] * int(case.variant.split()[0])
        nonfinite = empty(len(views) * case.rows, dtype=torch.int32)
        normalize.unit_embeddings(
            views,
            dtype=case.dtype,
            nonfinite=nonfinite,
            raised=empty(2, dtype=torch.int32),
            ticket=empty(dtype=torch.int32),
            spare=16,
        )
    elif case.kernel == "target":
        copies = [unit_MC.bfloat16()] if case.variant else []
        multi_tensor.lerp_([unit_MC], [unit_MC], copies, momentum=empty(dtype=torch.float64), skip=empty())
    else:
        settings = {"lr": empty(dtype=torch.float64), "momentum": 0.9, "weight_decay": 1e-6, "trust_coefficient": 1e-3}
        multi_tensor.lars_(
            [unit_MC], [unit_MC], [unit_MC], **settings, adapt=bool(case.variant), skip=empty(), scale=empty()
        )


@contextmanager
def compiling_for(architecture: int) -> Iterator[list]:
    """Inside, launches only compile for an architecture; yields the list of compiled kernels."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    # The part of a driver that Triton uses before it loads a kernel. It caches compiled kernels by device.
    part = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", architecture, 32),
        get_current_device=lambda: architecture,
        get_current_stream=lambda device: 0,
    )
    compiled = []
    run = JITFunction.run

    def compile_only(self, *arguments, grid, warmup, **keywords):
        compiled.append(run(self, *arguments, grid=grid, warmup=True, **keywords))

    driver.set_active(part)  # never reset, because the process does nothing but compile
    with (
        patch.object(JITFunction, "run", compile_only),
        patch.object(heuristics, "architecture_of", lambda _: table_name(architecture)),
    ):
        yield compiled


def compile_case(case: Case) -> list[Row]:
    """Compile the kernels of one launcher."""
    from triton.errors import TritonError

    try:
        with compiling_for(case.architecture) as kernels:
            launch(case)
    except (TritonError, RuntimeError) as error:
        return [Row(case, case.kernel, "", 0, 0, 0, 0, 0, {}, {}, f"{type(error).__name__}: {error}")]
    return [describe(case, kernel) for kernel in kernels]


def describe(case: Case, kernel) -> Row:
    """Read a compiled kernel."""
    names = kernel.src.fn.arg_names
    constants = {names[position]: value for (position, *_), value in kernel.src.constants.items()}
    registers, stack = resources(kernel.asm["cubin"])
    ptx = kernel.asm["ptx"]
    return Row(
        case,
        kernel.src.fn.__name__.removesuffix("_kernel"),
        " ".join(f"{key}={constants[key]}" for key in ("ROWS", "COLUMNS", "BLOCK", "DEPTH") if key in constants),
        kernel.metadata.num_warps,
        kernel.metadata.num_stages,
        registers,
        stack,
        kernel.metadata.shared,
        {
            name: count
            for name in sorted(set(MATRIX_INSTRUCTION.values()))
            if (count := len(re.findall(rf"\b{name}\b", ptx)))
        },
        access_widths(ptx),
    )


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes per thread."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", text).groups()
    return int(registers), int(stack)


def access_widths(ptx: str) -> dict[str, dict[int, int]]:
    """By pointer, the number of global-memory accesses to its blocks, by width in bits."""
    files = dict(re.findall(r'^\s*\.file\s+(\d+) "(.+)"$', ptx, re.MULTILINE))
    counts: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    # Within inline assembly LLVM increments the line number for each instruction, whatever the source.
    inline = r"// begin inline asm.*?// end inline asm"
    text = re.sub(inline, lambda match: re.sub(r"(?m)^\s*\.loc.*$", "", match[0]), ptx, flags=re.DOTALL)
    place = r"\.loc\s+(?P<file>\d+) (?P<line>\d+)"
    plain = r"\b(?P<operation>ld|st)\.global(?:\.\w+)*?(?:\.v(?P<count>\d))?\.[bfsu](?P<bits>\d+)\s"
    asynchronous = r"\bcp\.async\.c[ag]\.shared\S*\.global[^;]*?, (?P<bytes>0x\w+)"
    pointers: dict[str, str] = {}
    for match in re.finditer(f"{place}|{plain}|{asynchronous}", text):
        if match["file"]:
            pointers = block_pointers(Path(files[match["file"]]).name).get(int(match["line"]), {})
        elif pointer := pointers.get(match["operation"] or "ld"):
            counts[pointer][
                int(match["bytes"], 16) * 8 if match["bytes"] else int(match["count"] or 1) * int(match["bits"])
            ] += 1
    return {pointer: dict(accesses) for pointer, accesses in counts.items()}


@cache
def block_pointers(name: str) -> dict[int, dict[str, str]]:
    """By line of a kernel file, the pointers through which blocks are loaded ("ld") and stored ("st") there.

    Accesses with a mask count as blocks.
    """
    found: dict[int, dict[str, str]] = defaultdict(dict)
    path = heuristics.TABLE.with_name(name)  # Triton's cache may hold the path of another copy of the same source
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8") if path.exists() else "")):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("tl.load", "tl.store"):
            names = (name.id for name in ast.walk(node.args[0]) if isinstance(name, ast.Name))
            pointer = next(name for name in names if name.startswith("p_"))
            if pointer not in SMALL and any(keyword.arg == "mask" for keyword in node.keywords):
                found[node.lineno]["ld" if node.func.attr == "load" else "st"] = pointer
    return dict(found)


def compile_all(cases: Sequence[Case], console: Console | None = None) -> list[Row]:
    """Compile cases in one process per core, with a progress bar if a console is given."""
    context = multiprocessing.get_context("spawn")
    workers = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(workers, mp_context=context, initializer=prepare_worker) as pool:
        results = pool.map(compile_case, cases)
        if console is not None:
            results = track(results, "compiling", len(cases), console=console, transient=True)
        return [row for rows in results for row in rows]


def prepare_worker() -> None:
    os.environ.pop("TRITON_INTERPRET", None)
    torch.set_num_threads(1)


def main(output: Path) -> None:
    """Compile everything, print a line per kernel, architecture and arithmetic, and write all lines to a CSV file.

    Args:
        output: folder for compile_report.csv, which is overwritten.

    Raises:
        UserError: `output` is a file, or holds a compile_report.csv that is not such a report.
        RunStopped: a kernel does not compile, or needs more shared memory than its architecture has.
    """
    make_folder(output)
    path = output / "compile_report.csv"
    if path.exists() and not is_report(path):
        raise UserError(
            f"output = {output}: its compile_report.csv is a different file; give another folder, or move it away"
        )
    console = new_console()
    rows = compile_all([*dot_cases(), *row_cases()], console)
    console.print(summary(rows))
    write_csv(rows, path)
    console.print(f"{len(rows)} lines in {path}")
    failures = [f"{row.case}: {failure}" for row in rows if (failure := failure_of(row))]
    if failures:
        raise RunStopped("; ".join(failures))


def failure_of(row: Row) -> str:
    """Why a GPU could not run a kernel; empty if it could."""
    limit = SHARED_MEMORY[row.case.architecture]
    if row.shared > limit * 1024:
        return f"{row.shared / 1024:.0f} KiB of shared memory, but only {limit} are available"
    return row.error


def summary(rows: Iterable[Row]) -> Table:
    """A line per kernel, architecture, arithmetic, and whether C is divisible by 16."""
    groups = defaultdict(list)
    for row in rows:
        groups[row.name, row.case.architecture, row.case.arithmetic, row.case.width % 16 == 0].append(row)
    table = Table("kernel", "sm", "arithmetic", "C", "variants", "registers", "stack", "shared", "matrix", "128 bits")
    for (name, architecture, arithmetic, divides), members in sorted(groups.items()):
        registers = [row.registers for row in members]
        table.add_row(
            *(name, str(architecture), arithmetic, "16·n" if divides else "odd", str(len(members))),
            " to ".join(map(str, sorted({min(registers), max(registers)}))),
            str(max(row.stack for row in members)),
            f"{max(row.shared for row in members) / 1024:.0f} KiB",
            " ".join(sorted({name for row in members for name in row.instructions})) or "none",
            f"{min(row.wide for row in members):.0%}",
        )
    return table


def columns() -> list[str]:
    return [field.name for field in fields(Case)] + [field.name for field in fields(Row)][1:] + ["wide"]


def is_report(path: Path) -> bool:
    """Whether a file begins like one written by `write_csv`."""
    with suppress(OSError), path.open("rb") as file:
        return file.readline(10_000).strip() == ",".join(columns()).encode()
    return False


def write_csv(rows: Iterable[Row], path: Path) -> None:
    """Write all fields of each kernel."""
    keys = columns()
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(keys)
        for row in rows:
            writer.writerow([getattr(row.case if hasattr(row.case, key) else row, key) for key in keys])
