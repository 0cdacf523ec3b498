"""Speed and memory of the objective alone, forward and backward, against plain torch and against the limit.

    unigrad-fast bench kernels [--width C] [--images N]

    authors          the authors' formulation: whole-matrix expressions and autograd; under autocast, as published, F is
                     in half precision too
    torch            the best of plain torch: F moved by one in-place product over both views, the gradient by hand
    torch lerp       the same with bf16 operands and fp32 results, which torch has on a GPU only
    ours             `UniGrad`; on the CPU also with the product u·F in bf16, where the processor multiplies it

Each but the authors' and ours is measured as it is and compiled. All take the same embeddings of two views, and turns:
one block of steps each, round after round. A row has milliseconds per step; TFLOP/s and GB/s by the counts of our
design (`roofline.Design`) for the variant's precision; the share of that design's roofline, with peaks measured in the
same run; the peak memory of a step beyond what it starts with, gradients included, in fp32 elements per N·C (8 are the
gradients and three more of their size); the bytes of F and its copies, which stay; and the gradient's relative error
against float64.
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from unigrad_fast.benchmarks.authors import authors_loss
from unigrad_fast.benchmarks.memory import peak_bytes
from unigrad_fast.benchmarks.record import append_to, spread
from unigrad_fast.benchmarks.roofline import (
    DTYPES,
    Design,
    Peaks,
    float32_products,
    launches,
    measure_peaks,
    seconds,
)
from unigrad_fast.kernels.dispatch import use_triton
from unigrad_fast.objectives import UniGrad
from unigrad_fast.runtime import process_group
from unigrad_fast.runtime.errors import UserError
from unigrad_fast.runtime.precision import has_fast_bf16
from unigrad_fast.runtime.quiet import without_warnings

WIDTHS, IMAGES = (1024, 2048, 4096, 8192, 16384), (128, 512)
BALANCE, DECAY = 100.0, 0.99
WARMUP = 2  # steps of a variant before its first block
LEAST_ROUNDS = 3
MOST_STEPS = 1000  # of a block
WIDEST_COMPILED_ON_CPU = 8192
EXACTNESS = ("fp32", "tf32", "fp16", "bf16")  # from the most exact on

Views = Sequence[Tensor]


def release(online: Views) -> None:
    """Drops the gradients."""
    for z in online:
        z.grad = None


class Variant:
    """A way to compute the objective; `step` leaves the gradients with the online embeddings.

    Args:
        precision: a key of DTYPES.
        width: C.
        device: of the embeddings.
    """

    name: str

    def __init__(self, precision: str, width: int, device: torch.device):
        self.precision, self.device = precision, device
        self.design = Design.of(precision, device)

    def __str__(self) -> str:
        return f"{self.name}, {self.precision}"

    def step(self, online: Views, target: Views) -> None:
        release(online)
        with float32_products(self.precision):
            self.compute(online, target)

    def compute(self, online: Views, target: Views) -> None:
        raise NotImplementedError

    @property
    def correlation(self) -> Tensor:
        """F, [C, C]."""
        raise NotImplementedError

    def correlation_bytes(self) -> int:
        """Of F and what else is kept from step to step."""
        return self.correlation.nbytes


class Authors(Variant):
    name = "authors"

    def __init__(self, precision: str, width: int, device: torch.device):
        super().__init__(precision, width, device)
        self.moving: Tensor | None = None

    def compute(self, online: Views, target: Views) -> None:
        dtype = DTYPES[self.precision]
        with torch.autocast(self.device.type, dtype, enabled=dtype != torch.float32):
            loss, moving = authors_loss(online, target, self.moving, BALANCE, DECAY)
        self.moving = moving.to(dtype)
        loss.backward()

    @property
    def correlation(self) -> Tensor:
        return self.moving


class PlainTorch(Variant):
    """The best of plain torch; `move` takes a batch into F and returns u·F."""

    def __init__(self, precision: str, width: int, device: torch.device, compiled: bool):
        super().__init__(precision, width, device)
        self.moving = torch.zeros(width, width, device=device)
        self.first = True
        self.compiled = compiled
        self.gradient = torch.compile(self._gradient, dynamic=False, fullgraph=True) if compiled else self._gradient

    def __str__(self) -> str:
        return f"{self.name}{' compiled' if self.compiled else ''}, {self.precision}"

    def compute(self, online: Views, target: Views) -> None:
        # The first step is not worth a graph of its own.
        gradient, decay = (self._gradient, 0.0) if self.first else (self.gradient, DECAY)
        self.first = False
        with torch.no_grad():
            _, gradients = gradient([z.detach() for z in online], target, self.moving, decay)
        torch.autograd.backward(online, gradients)

    @classmethod
    def _gradient(cls, online: Views, target: Views, moving: Tensor, decay: float) -> tuple[Tensor, Views]:
        """u·g and dz of each view."""
        online_MC = torch.cat([*online])
        norm_M1 = torch.linalg.vector_norm(online_MC, dim=-1, keepdim=True, dtype=torch.float32).clamp_min(1e-12)
        unit_MC = online_MC / norm_M1
        target_MC = F.normalize(torch.cat([*target]).float(), dim=-1)
        gradient_MC = cls.move(moving, unit_MC, target_MC, decay).mul_(BALANCE)
        for view, other in zip(gradient_MC.chunk(2), reversed(target_MC.chunk(2)), strict=True):
            view.sub_(other)
        along_M1 = torch.linalg.vecdot(unit_MC, gradient_MC).unsqueeze(-1)
        gradient_MC.addcmul_(unit_MC, along_M1, value=-1.0).div_(norm_M1.mul_(len(unit_MC)))
        return along_M1.mean(), gradient_MC.to(online_MC.dtype).chunk(2)

    @staticmethod
    def move(moving: Tensor, unit_MC: Tensor, target_MC: Tensor, decay: float) -> Tensor:
        raise NotImplementedError

    @property
    def correlation(self) -> Tensor:
        return self.moving


class InPlace(PlainTorch):
    name = "torch"

    @staticmethod
    def move(moving: Tensor, unit_MC: Tensor, target_MC: Tensor, decay: float) -> Tensor:
        moving.addmm_(target_MC.T, target_MC, beta=decay, alpha=(1 - decay) / len(target_MC))
        return unit_MC @ moving


class Lerp(PlainTorch):
    name = "torch lerp"

    @staticmethod
    def move(moving: Tensor, unit_MC: Tensor, target_MC: Tensor, decay: float) -> Tensor:
        half_MC = (target_MC * len(target_MC) ** -0.5).bfloat16()
        moving.lerp_(torch.mm(half_MC.T, half_MC, out_dtype=torch.float32), 1 - decay)
        return torch.mm(unit_MC.bfloat16(), moving.bfloat16(), out_dtype=torch.float32)


class Ours(Variant):
    name = "ours"

    def __init__(self, precision: str, width: int, device: torch.device):
        super().__init__(precision, width, device)
        self.dtype = DTYPES[precision]
        on_cpu = device.type == "cpu" and self.dtype != torch.float32
        self.objective = UniGrad(width, BALANCE, DECAY, compute_dtype=self.dtype if on_cpu else None).to(device)

    def compute(self, online: Views, target: Views) -> None:
        on_gpu = self.device.type == "cuda" and self.dtype != torch.float32
        with torch.autocast(self.device.type, self.dtype, enabled=on_gpu):
            output = self.objective(online=online, target=target)
        output.loss.backward()

    @property
    def correlation(self) -> Tensor:
        return self.objective.correlation

    def correlation_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.objective.buffers() if buffer.dim() == 2)


KINDS = (Authors, PlainTorch, Ours)


def variants(width: int, device: torch.device, compiled: bool) -> list[Variant]:
    """All variants that a device has."""
    on_gpu = device.type == "cuda"
    single = ("fp32", "tf32") if on_gpu else ("fp32",)
    half = ("bf16",) if has_fast_bf16(device) else ()
    ways = [False]
    if compiled and (on_gpu or width <= WIDEST_COMPILED_ON_CPU):
        ways.append(True)
    return [
        *(Authors(precision, width, device) for precision in single),
        *(Authors(precision, width, device) for precision in ("fp16", *half) if on_gpu),
        *(InPlace(precision, width, device, way) for precision in single for way in ways),
        *(Lerp(precision, width, device, way) for precision in half for way in ways if on_gpu),
        *(Ours(precision, width, device) for precision in (*single, *half)),
    ]


def draw_embeddings(images: int, width: int, device: torch.device, dtype: torch.dtype) -> tuple[Views, Views]:
    """Two views' online embeddings, which take gradients, and target embeddings: related, of unit deviation, [N, C]."""
    generator = torch.Generator().manual_seed(0)
    image_NC = torch.randn(images, width, generator=generator)
    noise = (torch.randn(images, width, generator=generator) for _ in range(4))
    views = [((image_NC + noise_NC) / 2**0.5).to(device, dtype) for noise_NC in noise]
    return [z.requires_grad_() for z in views[:2]], views[2:]


def exact_gradient(online: Views, target: Views) -> Tensor:
    """dz [2·N, C] in float64 where F is this batch's correlation, as it is after any number of equal batches.

    u·F is (u·mᵀ)·m / (2·N): no matrix of size C×C.
    """
    z = torch.cat([*online]).detach().double()
    norm = torch.linalg.vector_norm(z, dim=-1, keepdim=True)
    unit, targets = z / norm, F.normalize(torch.cat([*target]).double(), dim=-1)
    gradient = BALANCE * (unit @ targets.T) @ targets / len(targets) - targets.roll(len(online[0]), 0)
    along = torch.linalg.vecdot(unit, gradient).unsqueeze(-1)
    return (gradient - unit * along) / (norm * len(unit))


def gradient_error(online: Views, target: Views) -> float:
    """Relative norm of what the gradients of the online embeddings lack to those of float64."""
    exact = exact_gradient(online, target)
    error = torch.cat([z.grad for z in online]).double() - exact
    return (torch.linalg.vector_norm(error) / torch.linalg.vector_norm(exact)).item()


class Measured:
    """A variant on its embeddings, and what was found: `milliseconds`, one per round, or why it `failed`."""

    def __init__(self, variant: Variant, images: int, width: int):
        self.variant, self.images, self.width = variant, images, width
        self.views = draw_embeddings(images, width, variant.device, DTYPES[variant.design.embedding])
        self.milliseconds: list[float] = []
        self.memory = self.error = self.correlation_bytes = self.failed = None

    def step(self) -> None:
        self.variant.step(*self.views)

    def prepare(self, block_seconds: float) -> None:
        """Warm up, take memory and error, and set how many steps make a block."""
        try:
            with without_warnings():
                memory = peak_bytes(self.step, lambda: release(self.views[0]), self.variant.device, WARMUP)
        except Exception as problem:
            if not getattr(self.variant, "compiled", False):
                raise
            # A machine without a compiler, or a torch that cannot compile this.
            self.failed = f"{type(problem).__name__}: {str(problem).strip().splitlines()[0]}"
            return
        self.memory = memory / (4 * self.images * self.width)
        self.error = gradient_error(*self.views)
        self.correlation_bytes = self.variant.correlation_bytes()
        self.step()  # F's copies are there again after F was looked at
        self.estimate = seconds(self.step, self.variant.device)
        self.steps = min(MOST_STEPS, max(1, int(block_seconds / self.estimate)))

    def block(self) -> None:
        """Measures a block of steps; of short ones, those before it fill the caches."""
        if self.steps > 1:
            self.step()
        self.milliseconds.append(seconds(self.step, self.variant.device, self.steps) * 1e3)

    def row(self, peaks: Peaks) -> dict:
        row = {"what": str(self.variant), "unit": "ms", "failed": self.failed}
        times = spread(self.milliseconds) if self.milliseconds else dict.fromkeys(("median", "least", "most"))
        row |= {**times, "tflops": None, "gb_per_s": None, "roofline_share": None}
        if self.milliseconds:
            design, took = self.variant.design, row["median"] / 1e3
            kernels = launches(self.images).items()
            row["tflops"] = sum(design.flops(kernel, M, self.width) for kernel, M in kernels) / took / 1e12
            row["gb_per_s"] = sum(design.bytes(kernel, M, self.width) for kernel, M in kernels) / took / 1e9
            row["roofline_share"] = peaks.least_seconds(design, self.images, self.width) / took
        return row | {
            "memory_nc": self.memory,
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
    """All variants, block by block in turn; fewer rounds than `repetitions` where they would take `most_seconds`."""
    measured = [Measured(variant, images, width) for variant in chosen]
    for each in measured:
        report(f"C = {width}, N = {images}: preparing {each.variant}")
        each.prepare(block_seconds)
    working = [each for each in measured if each.failed is None]
    round_seconds = sum(each.estimate * (each.steps + (each.steps > 1)) for each in working)
    rounds = min(repetitions, max(LEAST_ROUNDS, int(most_seconds / round_seconds)))
    for number in range(rounds):
        report(f"C = {width}, N = {images}: round {number + 1} of {rounds}")
        for each in working:
            each.block()
    return measured


def ratio_rows(measured: Sequence[Measured]) -> list[dict]:
    """How many times as fast ours is, one ratio per round: median, least and most.

    In each precision against the authors' in the same one (else in fp32), against the best of plain torch's that are
    no less exact, and against ours in fp32.
    """
    of = {kind: [each for each in measured if each.milliseconds and isinstance(each.variant, kind)] for kind in KINDS}
    rows = []

    def compare(ours: Measured, other: Measured, against: str) -> None:
        pairs = zip(other.milliseconds, ours.milliseconds, strict=True)
        ratios = spread([theirs / mine for theirs, mine in pairs])
        rows.append({"what": f"{ours.variant} / {other.variant}", "unit": "ratio", "against": against, **ratios})

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
    end: float = math.inf,
    progress: Callable[[str], None] = lambda what: None,
) -> list[dict]:
    """Measure, print the tables and append the rows to a file.

    Args:
        device: where to.
        shapes: C and N of each measurement.
        repetitions: rounds at most, in each of which every variant has a block.
        block_seconds: what a block takes at least, in whole steps.
        most_seconds: of the rounds of one shape; at least LEAST_ROUNDS are made all the same.
        compiled: whether torch.compile has its turn.
        output: file of JSON lines; None writes none.
        end: by `time.monotonic`; no shape is begun after it.
        progress: is told what is being done.

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
    print("limit: share of the roofline; N·C: peak memory beyond F in fp32 arrays of that size; F: with its copies")
    for C, N in itertools.takewhile(lambda _: time.monotonic() < end, shapes):
        torch.compiler.reset()  # it gives up after some shapes
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
        del measured  # every variant holds an F, and the next ones come before these would go
        print("\n".join(lines(f"C = {C}, N = {N}", found)), flush=True)
        rows += found
        if output is not None:
            append_to(output, found)
    if output is not None:
        print(f"rows appended to {output}")
    return rows


def main(width: int | None = None, images: int | None = None, output: Path | None = None, **settings) -> None:
    """`bench` on this machine's device.

    Args:
        width: C; None is each of WIDTHS.
        images: N per view; None is each of IMAGES.
        output, settings: keyword arguments of `bench`.

    Raises:
        UserError: the environment says that this is one process of several; the output is a folder.
    """
    if output is not None and output.is_dir():
        raise UserError(f"output = {output}: is a folder; name a file")
    if process_group.launch_environment(os.environ).size > 1:
        raise UserError("bench kernels measures one process; start it without torchrun, deepspeed or srun")
    shapes = itertools.product([width] if width else WIDTHS, [images] if images else IMAGES)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        use_triton(device)
    except ValueError as error:
        raise UserError(str(error)) from None
    from rich.console import Console  # here: `bench` runs where torch and Triton are all there is

    with Console().status("starting") as status:
        bench(device, shapes, output=output, progress=status.update, **settings)
