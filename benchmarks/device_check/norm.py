"""The batch-norm kernels on a device: errors against float64, repeatability, and the time of each against a copy's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from unigrad_fast.benchmarks.device_check.finding import Finding
from unigrad_fast.benchmarks.device_check.step import captured
from unigrad_fast.benchmarks.harness.record import append
from unigrad_fast.benchmarks.harness.turns import distance

GATE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}  # relative norm of an error
GROUPS = 2
ROUNDS = 20
Shape: TypeAlias = "tuple[int, int, int]"  # images per group, channels, side
LAYERS: tuple[Shape, ...] = ((64, 64, 112), (64, 256, 56), (64, 512, 28), (64, 1024, 14), (64, 2048, 7))
"""A layer of each stage of ResNet-50 at 64 images."""
CHECKED: Shape = (16, 200, 9)
SMALL: Shape = (3, 40, 3)
DTYPES_ON_A_GPU = (torch.float32, torch.bfloat16)


class Case(NamedTuple):
    """What follows a norm.

    Attributes:
        moved: by kernel, the tensors of the layer's size that it has to move in bf16 (`benchmarks/ROOFLINE.md`).
        twice: the result is used twice.
        pool: ReLU and a ResNet's max-pool follow; otherwise an addition and ReLU.
    """

    name: str
    moved: dict[str, float]
    twice: bool = False
    pool: bool = False


# The ReLU's mask is 1/16 of a tensor; a pooled result 1/4, and the positions that it was chosen from 1/8.
ADDED = {"statistics_kernel": 1, "normalise_kernel": 3 + 1 / 16, "sums_kernel": 3 + 1 / 16, "gradient_kernel": 3}
POOLED = {"statistics_kernel": 1, "pool_kernel": 11 / 8, "sums_kernel": 11 / 8, "gradient_kernel": 19 / 8}
ALONE = Case("add + ReLU", ADDED)
TWICE = Case("add + ReLU, twice", ADDED | {"sums_kernel": 4 + 1 / 16}, twice=True)
POOL = Case("ReLU + max-pool", POOLED, pool=True)
CASES = (ALONE, TWICE, POOL)
TIMED = (*((ALONE, layer) for layer in LAYERS), (TWICE, LAYERS[1]), (POOL, LAYERS[0]))
"""Each where ResNet-50 has the most of it."""


class Inputs(NamedTuple):
    """Of a norm and what follows: x, the other summand (not used with max-pool), and the gradient of each result."""

    case: Case
    x: Tensor
    shortcut: Tensor
    gradients: tuple[Tensor, ...]

    def double(self) -> Inputs:
        gradients = tuple(each.double() for each in self.gradients)
        return self._replace(x=self.x.double(), shortcut=self.shortcut.double(), gradients=gradients)


def batch_norm(device: torch.device) -> Iterator[Finding]:
    """Norms of two groups against float64, and against themselves."""
    on_gpu = device.type == "cuda"
    for dtype in DTYPES_ON_A_GPU if on_gpu else (torch.float32, torch.float16):
        for case in CASES:
            inputs = drawn(case, CHECKED if on_gpu else SMALL, dtype, device)
            norm, exact = norms(inputs.x.shape[1], device)
            found, again = (step(ours, norm, inputs) for _ in range(2))
            expected = step(separately, exact, inputs.double())
            error = max(distance(a, b) for a, b in zip(found, expected, strict=True))
            name = f"{case.name}, {str(dtype).removeprefix('torch.')}"
            yield Finding(f"error of batch norm + {name}", f"{error:.1e}", error < GATE[dtype])
            same = all(map(torch.equal, found, again))
            yield Finding(f"repeated batch norm + {name}", "bitwise equal" if same else "differs", same)


def layers(device: torch.device, output: Path | None = None) -> Iterator[Finding]:
    """Times of each kernel by layer; appended to device_step.jsonl in the folder `output`, if there is one."""
    rows: list[dict] = []
    for case, shape in TIMED if device.type == "cuda" else [(case, SMALL) for case in CASES]:
        yield from times(case, shape, device, rows)
    if output is not None:
        append(output, "device_step", rows)


def drawn(case: Case, shape: Shape, dtype: torch.dtype, device: torch.device) -> Inputs:
    """Random inputs for all groups."""
    images, channels, side = shape
    generator = torch.Generator().manual_seed(0)

    def normal(size: int) -> Tensor:
        return torch.randn(GROUPS * images, channels, size, size, generator=generator)

    x = separated(GROUPS * images, channels, side, generator) if case.pool else normal(side)
    tensors = (x, normal(side), *(normal((side + 1) // 2 if case.pool else side) for _ in range(1 + case.twice)))
    x, shortcut, *gradients = (t.to(device, dtype).contiguous(memory_format=torch.channels_last) for t in tensors)
    return Inputs(case, x, shortcut, tuple(gradients))


def separated(images: int, channels: int, side: int, generator: torch.Generator) -> Tensor:
    """Numbers from 0 to 9 that differ by 1/2 or more in each window of 3 x 3: rounding does not move a maximum."""
    levels = torch.rand(images, channels, 9, generator=generator).argsort(-1)
    position = torch.arange(side) % 3
    levels = levels[:, :, 3 * position[:, None] + position]
    return levels + torch.rand(levels.shape, generator=generator) / 2


def norms(channels: int, device: torch.device) -> tuple[nn.Module, nn.Module]:
    """Ours for two groups, and torch's in float64 with the same parameters."""
    from unigrad_fast.networks.batch_norm import convert

    norm = nn.BatchNorm2d(channels)
    nn.init.uniform_(norm.weight, 0.5, 1.5)
    nn.init.normal_(norm.bias)
    exact = nn.BatchNorm2d(channels, dtype=torch.float64)
    exact.load_state_dict(norm.state_dict())
    convert(norm, synchronised=False).count = GROUPS
    return norm.to(device), exact.to(device)


def ours(norm: nn.Module, case: Case, x: Tensor, shortcut: Tensor) -> tuple[Tensor, ...]:
    """The results, one for each gradient."""
    if case.pool:
        return (norm(x, relu=True, pool=max_pool()),)
    y = norm(x, residual=shortcut, relu=True, twice=case.twice)
    return y if isinstance(y, tuple) else (y,) * (1 + case.twice)


def separately(norm: nn.Module, case: Case, x: Tensor, shortcut: Tensor) -> tuple[Tensor, ...]:
    """The same by torch's operations, group by group."""
    y = torch.cat([norm(part) for part in x.chunk(GROUPS)])
    if case.pool:
        return (max_pool()(torch.relu(y)),)
    return (torch.relu(y + shortcut),) * (1 + case.twice)


def max_pool() -> nn.MaxPool2d:
    """A ResNet's."""
    return nn.MaxPool2d(kernel_size=3, stride=2, padding=1)


def step(forward: Callable[..., tuple[Tensor, ...]], norm: nn.Module, inputs: Inputs) -> list[Tensor]:
    """Result and gradients of `ours` or `separately`."""
    summands = [each.detach().requires_grad_() for each in (inputs.x, inputs.shortcut)]
    norm.zero_grad()
    results = forward(norm, inputs.case, *summands)
    torch.autograd.backward(results, inputs.gradients)
    gradients = [each.grad for each in summands if each.grad is not None]
    return [results[0].detach(), *gradients, norm.weight.grad, norm.bias.grad]


def times(case: Case, shape: Shape, device: torch.device, rows: list[dict]) -> Iterator[Finding]:
    """Time forward and backward from a graph: each kernel of ours, and torch's as a whole.

    Kernels are also given as a share of a copy's bandwidth, from the bytes that they have to move. Adds rows to `rows`.
    """
    inputs = drawn(case, shape, torch.bfloat16, device)
    images, channels, side, _ = inputs.x.shape
    norm, _ = norms(channels, device)
    torchs = nn.BatchNorm2d(channels, device=device)
    target = torch.empty_like(inputs.x)
    runs = {
        "ours": lambda: step(ours, norm, inputs),
        "torch": lambda: step(separately, torchs, inputs),
        "copy": lambda: target.copy_(inputs.x),
    }
    what = f"{case.name}, {images} x {channels} x {side}²"
    if device.type != "cuda":
        for run in runs.values():
            run()
        yield Finding(f"batch norm + {what}", "ran", True)
        return
    by_kernel = {name: kernel_milliseconds(run) for name, run in runs.items()}
    copy, theirs = (sum(by_kernel[name].values()) for name in ("copy", "torch"))
    for kernel, taken in by_kernel["ours"].items():
        tensors = case.moved.get(kernel)
        share = f", {tensors / 2 * copy / taken:.0%} of a copy's bandwidth" if tensors else ""
        yield Finding(f"{kernel}, {what}", f"{1e3 * taken:.1f} us{share}", True)
    said = f"ours {sum(by_kernel['ours'].values()):.3f} ms, torch {theirs:.3f}, copy {copy:.3f}"
    yield Finding(f"batch norm + {what}", said, True)
    for name, kernels in by_kernel.items():
        of = {"unit": "ms", "case": what}
        rows += [{"what": f"batch norm, {name}: {kernel}", **of, "mean": taken} for kernel, taken in kernels.items()]


def kernel_milliseconds(run: Callable[[], object]) -> dict[str, float]:
    """Mean milliseconds of each kernel of a function, by name, in replays of a CUDA graph; several of a name are added.

    Raises:
        RuntimeError: the profiler saw no kernel.
    """
    from torch.profiler import ProfilerActivity, profile

    graph, _ = captured(run)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(ROUNDS):
            graph.replay()
        torch.cuda.synchronize()
    found: dict[str, float] = {}
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found[event.name] = found.get(event.name, 0.0) + event.device_time / 1e3 / ROUNDS
    if not found:
        raise RuntimeError("the profiler saw no kernel in a replayed graph")
    return found
