"""Host time of a training step by kind of call, measured without a GPU.

    python -m unigrad_fast.benchmarks.counts.host [--output benchmarks/results]

Each kind is repeated on tensors of a few elements, so that Python, torch's dispatcher and the memory of the result are
nearly all that takes time. Kernels are launched through Triton's own code onto a driver that does nothing. The dry run
takes the figures from `cards.json`, which also names what cannot be measured without a GPU: a launch in the driver,
NCCL's enqueuing, a call of cuDNN. Rows are appended to OUTPUT/host.jsonl.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unigrad_fast.benchmarks.harness.record import OUTPUT, append, make_folder
from unigrad_fast.benchmarks.harness.script import run
from unigrad_fast.kernels import batch_norm
from unigrad_fast.kernels.dispatch import as_on_cuda
from unigrad_fast.networks.batch_norm import convert
from unigrad_fast.networks.lockstep import Steps, together
from unigrad_fast.runtime.collectives import gather_into
from unigrad_fast.runtime.torch_private import init_fake_process_group

CALLS, ROUNDS = 200, 25  # calls per round; the median of the rounds counts
CHAIN = 100


class _Function(torch.autograd.Function):
    """A function of Python that saves what batch norm saves."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *saved: Tensor) -> Tensor:
        ctx.save_for_backward(x, *saved)
        ctx.settings = (1e-5, True)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return dy, *([None] * (len(ctx.saved_tensors) - 1))


def microseconds(call: Callable[[], object], calls: int = CALLS) -> float:
    """Median microseconds of a call."""
    found = []
    for _ in range(ROUNDS + 1):
        began = time.perf_counter()
        for _ in range(calls):
            call()
        found.append(1e6 * (time.perf_counter() - began) / calls)
    return statistics.median(found[1:])


def kinds() -> dict[str, float]:
    """Microseconds by kind of call, as `dry_run.host` counts them."""
    leaf = torch.zeros(1, 8, 1, 1, requires_grad=True)
    x, saved = leaf * 1, [torch.zeros(8) for _ in range(5)]
    identity = nn.Identity()
    views = (lambda: x.view(-1), lambda: x.permute(0, 2, 3, 1), lambda: x[0], lambda: x.detach())
    found = {
        "view": statistics.mean(map(microseconds, views)),
        "operator": microseconds(lambda: torch.add(x, x)),
        "module": microseconds(lambda: identity(x)),
    }

    def backward(y: Tensor) -> float:
        ones = torch.ones_like(y)
        return microseconds(lambda: torch.autograd.grad(y, leaf, ones, retain_graph=True), 1) / CHAIN

    chain = own = x
    for _ in range(CHAIN):
        chain, own = chain.relu(), _Function.apply(own, *saved)
    found["operator of backward"] = backward(chain)
    found["function"] = microseconds(lambda: _Function.apply(x, *saved))
    found["function of backward"] = backward(own)
    found["hook"] = _hook()
    found["kernel"] = _kernel()
    found["collective"] = _collective()
    return found | _norms(found)


def _norms(parts: Mapping[str, float]) -> dict[str, float]:
    """What a norm's passes and a gather in lockstep take besides the calls of other kinds inside them."""
    norms = nn.ModuleList(nn.BatchNorm2d(16) for _ in range(2))
    convert(norms).count = 2
    x = torch.zeros(4, 16, 1, 1).contiguous(memory_format=torch.channels_last)
    own, leaf = torch.ones(1, requires_grad=True), x.clone().requires_grad_()

    def steps(norm: nn.Module, x: Tensor) -> Steps:
        yield norm, x
        return norm(x, relu=True)

    def without_gradient() -> None:
        with torch.no_grad():
            norms[0](x, relu=True)

    def backward(y: Tensor, *inputs: Tensor) -> float:
        ones = torch.ones_like(y)
        return microseconds(lambda: torch.autograd.grad(y, inputs, ones, retain_graph=True))

    init_fake_process_group(8)
    try:
        with as_on_cuda(), nothing_driven():
            target, online = microseconds(without_gradient), microseconds(lambda: norms[1](leaf, relu=True))
            both = microseconds(lambda: together(steps(norms[0], x), steps(norms[1], leaf)))
            of_backward = backward(norms[1](leaf, relu=True), leaf, *norms[1].parameters())
    finally:
        dist.destroy_process_group()
    inside = parts["module"] + 3 * parts["kernel"] + parts["collective"]
    return {
        "norm": max(0.0, (target + online - parts["function"]) / 2 - inside),
        "norm of backward": max(
            0.0, of_backward - backward(_Function.apply(own), own) - 2 * parts["kernel"] - parts["collective"]
        ),
        "gather in lockstep": max(0.0, both - target - online + parts["collective"]),
    }


def _hook() -> float:
    """What a post-accumulate hook adds to a gradient's accumulation."""

    def accumulate(hooked: bool) -> float:
        weights = [torch.zeros(1, requires_grad=True) for _ in range(CHAIN)]
        for weight in weights if hooked else ():
            weight.register_post_accumulate_grad_hook(lambda _: None)
        total = torch.cat(weights).sum()
        return microseconds(lambda: total.backward(retain_graph=True), 1) / CHAIN

    return max(0.0, accumulate(True) - accumulate(False))


def _kernel() -> float:
    """One of our operators: its launcher's Python, and Triton's up to the driver."""
    x, rows = torch.zeros(8, 64), torch.zeros(2, 64)
    with nothing_driven():
        arguments = (rows, rows, rows[0], rows[0], None, 1e-5, True, False)
        return microseconds(lambda: batch_norm.normalise(x, *arguments))


def _collective() -> float:
    """A collective's Python and dispatch, in a group without other ranks."""
    tensor, whole = torch.zeros(64), torch.zeros(8, 64)
    init_fake_process_group(8)
    try:
        return statistics.mean(
            map(microseconds, (lambda: dist.all_reduce(tensor), lambda: gather_into(whole.view(-1), tensor)))
        )
    finally:
        dist.destroy_process_group()


@contextmanager
def nothing_driven() -> Iterator[None]:
    """Inside, Triton launches kernels for sm_90 that need not be compiled and do nothing."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    def compiled(function: Any, key: Any, signature: Any, device: int, *_: Any) -> SimpleNamespace:
        kernel = SimpleNamespace(
            run=lambda *_: None, launch_metadata=lambda *_: None, function=0, packed_metadata=(), metadata=None
        )
        function.device_caches[device][0][key] = kernel
        return kernel

    nothing = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )
    functions = [each for each in vars(batch_norm).values() if isinstance(each, JITFunction)]
    kept = [(function, function.device_caches) for function in functions]
    with mock.patch.object(type(driver), "active", nothing), mock.patch.object(JITFunction, "_do_compile", compiled):
        for function in functions:
            function.device_caches = type(function.device_caches)(function.create_binder)
        yield
    for function, caches in kept:
        function.device_caches = caches


def main(output: Path = OUTPUT) -> None:
    """Measure each kind, print the table and append the row.

    Args:
        output: folder of host.jsonl.
    """
    make_folder(output)
    torch.set_num_threads(1)
    found = kinds()
    for kind, each in found.items():
        print(f"{kind:22} {each:6.2f} microseconds")
    print(f"row appended to {append(output, 'host', [{'microseconds': found}])}")


if __name__ == "__main__":
    sys.exit(run(main))
