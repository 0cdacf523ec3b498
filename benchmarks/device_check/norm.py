"""The batch-norm kernels on a device: errors against float64, repeatability, and the time of each against a copy's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from unigrad_fast.benchmarks.device_check.finding import Finding
from unigrad_fast.benchmarks.device_check.step import captured
from unigrad_fast.benchmarks.harness.record import append
from unigrad_fast.benchmarks.harness.turns import distance

GATE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}  # relative norm of an error
GROUPS = 2
# Images per group, channels, side: a layer of each stage of ResNet-50 at 64 images.
LAYERS = ((64, 64, 112), (64, 256, 56), (64, 512, 28), (64, 1024, 14), (64, 2048, 7))
SMALL = ((3, 40, 3),)
# Tensors of the layer's size that a kernel has to move. With the addition the ReLU's mask is kept, 1/16 of one in bf16.
MOVED = {
    "statistics_kernel": 1,
    "normalise_kernel": 3 + 1 / 16,
    "sums_kernel": 2 + 1 / 16,
    "gradient_kernel": 4 + 1 / 16,
}
ROUNDS = 20


def batch_norm(device: torch.device) -> Iterator[Finding]:
    """Norms of two groups with addition and ReLU against float64, and against themselves."""
    on_gpu = device.type == "cuda"
    dtypes = (torch.float32, torch.bfloat16) if on_gpu else (torch.float32, torch.float16)
    for dtype in dtypes:
        images, channels, side = (16, 200, 9) if on_gpu else (3, 40, 3)
        x, shortcut, dy = drawn(GROUPS * images, channels, side, dtype, device)
        norm, exact = norms(channels, device)
        found, again = (step(norm, x, shortcut, dy) for _ in range(2))
        expected = separately(exact, x.double(), shortcut.double(), dy.double())
        error = max(distance(a, b) for a, b in zip(found, expected, strict=True))
        name = str(dtype).removeprefix("torch.")
        yield Finding(f"error of batch norm, {name}", f"{error:.1e}", error < GATE[dtype])
        same = all(map(torch.equal, found, again))
        yield Finding(f"batch norm twice, {name}", "bitwise equal" if same else "differs", same)


def layers(device: torch.device, output: Path | None = None) -> Iterator[Finding]:
    """Times of each kernel by layer; appended to device_step.jsonl in the folder `output`, if there is one."""
    rows: list[dict] = []
    for images, channels, side in LAYERS if device.type == "cuda" else SMALL:
        yield from times(images, channels, side, device, rows)
    if output is not None:
        append(output, "device_step", rows)


def drawn(images: int, channels: int, side: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = (torch.randn(images, channels, side, side, generator=generator) for _ in range(3))
    return [t.to(device, dtype).contiguous(memory_format=torch.channels_last) for t in tensors]


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


def step(norm: nn.Module, x: Tensor, shortcut: Tensor, dy: Tensor) -> list[Tensor]:
    """Output and gradients of relu(norm(x) + shortcut)."""
    x, shortcut = x.detach().requires_grad_(), shortcut.detach().requires_grad_()
    norm.zero_grad()
    y = norm(x, residual=shortcut, relu=True)
    y.backward(dy)
    return [y.detach(), x.grad, shortcut.grad, norm.weight.grad, norm.bias.grad]


def separately(norm: nn.Module, x: Tensor, shortcut: Tensor, dy: Tensor) -> list[Tensor]:
    """The same by torch's operations, group by group."""
    x, shortcut = x.detach().requires_grad_(), shortcut.detach().requires_grad_()
    y = torch.relu(torch.cat([norm(part) for part in x.chunk(GROUPS)]) + shortcut)
    y.backward(dy)
    return [y.detach(), x.grad, shortcut.grad, norm.weight.grad, norm.bias.grad]


def times(images: int, channels: int, side: int, device: torch.device, rows: list[dict]) -> Iterator[Finding]:
    """Time forward and backward with addition and ReLU from a graph: each kernel of ours, and torch's as a whole.

    Kernels are also given as a share of a copy's bandwidth, from the bytes that they have to move. Adds rows to `rows`.
    """
    x, shortcut, dy = drawn(GROUPS * images, channels, side, torch.bfloat16, device)
    norm, _ = norms(channels, device)
    torchs = nn.BatchNorm2d(channels, device=device)
    target = torch.empty_like(x)
    runs = {
        "ours": lambda: step(norm, x, shortcut, dy),
        "torch": lambda: separately(torchs, x, shortcut, dy),
        "copy": lambda: target.copy_(x),
    }
    what = f"{GROUPS * images} x {channels} x {side}²"
    if device.type != "cuda":
        for run in runs.values():
            run()
        yield Finding(f"batch norm + add + ReLU, {what}", "ran", True)
        return
    by_kernel = {name: kernel_milliseconds(run) for name, run in runs.items()}
    copy, theirs = (sum(by_kernel[name].values()) for name in ("copy", "torch"))
    for kernel, taken in by_kernel["ours"].items():
        tensors = MOVED.get(kernel)
        share = f", {tensors / 2 * copy / taken:.0%} of a copy's bandwidth" if tensors else ""
        yield Finding(f"{kernel}, {what}", f"{1e3 * taken:.1f} us{share}", True)
    ours = sum(by_kernel["ours"].values())
    yield Finding(f"batch norm + add + ReLU, {what}", f"ours {ours:.3f} ms, torch {theirs:.3f}, copy {copy:.3f}", True)
    case = {"unit": "ms", "case": what}
    for name, kernels in by_kernel.items():
        rows += [{"what": f"batch norm, {name}: {kernel}", **case, "mean": taken} for kernel, taken in kernels.items()]


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
