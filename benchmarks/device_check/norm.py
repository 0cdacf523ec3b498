"""The batch-norm kernels on a device: errors against float64, bitwise repeatability and, on a GPU, times vs torch's."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from unigrad_fast.benchmarks.device_check.finding import Finding
from unigrad_fast.benchmarks.harness.turns import distance, seconds

GATE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}  # relative norm of an error
GROUPS = 2
# Images per group, channels, side: a layer of each stage of ResNet-50 at 64 images; timed on a GPU only.
LAYERS = ((64, 64, 112), (64, 256, 56), (64, 512, 28), (64, 1024, 14), (64, 2048, 7))
ROUNDS = 20


def batch_norm(device: torch.device) -> Iterator[Finding]:
    """Norms of two groups with addition and ReLU."""
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
    if on_gpu:
        for images, channels, side in LAYERS:
            yield from times(images, channels, side, device)


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
    exact = nn.BatchNorm2d(channels).double()
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


def times(images: int, channels: int, side: int, device: torch.device) -> Iterator[Finding]:
    """Time forward and backward with addition and ReLU, ours and torch's, in milliseconds.

    Ours is also given as a share of a copy's bandwidth, from the bytes that it has to move.
    """
    x, shortcut, dy = drawn(GROUPS * images, channels, side, torch.bfloat16, device)
    norm, _ = norms(channels, device)
    torchs = nn.BatchNorm2d(channels, device=device)
    target = torch.empty_like(x)
    copy = milliseconds(lambda: target.copy_(x), device)
    ours = milliseconds(lambda: step(norm, x, shortcut, dy), device)
    theirs = milliseconds(lambda: separately(torchs, x, shortcut, dy), device)
    # Forward: x twice, shortcut, y; backward: dy and x twice, dx and the shortcut's gradient. A copy moves two tensors.
    least = copy * 10 / 2
    said = (
        f"ours {ours:.3f} ms, torch {theirs:.3f}, {theirs / ours:.2f} times; {least / ours:.0%} of a copy's bandwidth"
    )
    yield Finding(f"batch norm + add + ReLU, {GROUPS * images} x {channels} x {side}²", said, True)


def milliseconds(run: Callable[[], object], device: torch.device) -> float:
    for _ in range(3):
        run()
    return 1e3 * seconds(run, device, ROUNDS)
