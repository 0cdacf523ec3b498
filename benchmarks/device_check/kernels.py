"""Checks of the kernels on a GPU, or in the interpreter.

Correctness against float64 in every arithmetic, determinism over 100 runs, a second stream, a CUDA graph, the number of
launches, no recompilation when scalars change, the multi-tensor kernels, grouped batch norm against torch's, the target
branch on its own stream; and the time of each kernel of the objective compared with its roofline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from unigrad_fast.benchmarks.counts.roofline import Design, Peaks, float32_products, measure_peaks
from unigrad_fast.benchmarks.counts.roofline import launches as counted
from unigrad_fast.benchmarks.device_check.finding import Finding, findings
from unigrad_fast.benchmarks.device_check.norm import batch_norm
from unigrad_fast.benchmarks.device_check.product import products
from unigrad_fast.benchmarks.device_check.step import captured, target_stream
from unigrad_fast.benchmarks.harness.turns import distance
from unigrad_fast.kernels import (
    correlation_product,
    embedding_gradient,
    mirror_,
    unigrad_gradient,
    unit_embeddings,
    update_correlation_,
)
from unigrad_fast.objectives import UniGrad

BALANCE = 100.0
GATES = {"ieee": 1e-6, "tf32x3": 1e-5, "tf32": 2e-3, "fp16": 1e-3, "bf16": 5e-3}  # relative norm of dz's error
DTYPES = dict.fromkeys(GATES, torch.float32) | {"fp16": torch.float16, "bf16": torch.bfloat16}
SIZES_ON_A_GPU = ((2, 512, 2048), (2, 128, 16384), (8, 64, 4096), (3, 37, 1000))
"""Views, images, width; the last width is no multiple of any tile."""
SLACK = 1.5  # also at most so many times plain torch's error in the same arithmetic, if the bound is above 1e-6
REPEATS = 100
MOST_LAUNCHES = 6
SHAPES = ((2048, 128), (16384, 128), (16384, 512))  # width and images, the most telling first


def embeddings(device: torch.device, views: int, images: int, width: int, dtype: torch.dtype) -> list[Tensor]:
    """Online embeddings of all views, then two of the target; correlated, [N, C] each."""
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(images, width, generator=generator)
    noise = (torch.randn(images, width, generator=generator) for _ in range(views + 2))
    return [(image + each).to(device, dtype) for each in noise]


def formula(z: list[Tensor], dtype: torch.dtype, product: torch.dtype) -> Tensor:
    """dz from plain whole-matrix expressions, sums in `dtype`, operands of matrix products rounded to `product`."""
    *online, first, second = [torch.nn.functional.normalize(each.to(dtype), dim=-1) for each in z]
    target = torch.cat([first, second]).to(product)
    correlation = (target.to(dtype).T @ target.to(dtype) / len(target)).to(product)
    rows = []
    for number, unit in enumerate(online):
        positive = (second, first)[number] if number < 2 else (first + second) / 2
        g = BALANCE * (unit.to(product) @ correlation).to(dtype) - positive
        norm = torch.linalg.vector_norm(z[number].to(dtype), dim=-1, keepdim=True)
        rows.append((g - unit * (unit * g).sum(-1, keepdim=True)) / (norm * len(unit) * len(online)))
    return torch.cat(rows)


def fresh_objective(device: torch.device, width: int, arithmetic: str = "ieee"):
    return UniGrad(width, BALANCE, compute_dtype=DTYPES[arithmetic]).to(device)


def kernels_once(z: list[Tensor], arithmetic: str) -> tuple[Tensor, Tensor, Tensor]:
    """dz, the terms and F of one step, computed by calling the kernels directly."""
    images, width, views = *z[0].shape, len(z) - 2
    dtype, rows = DTYPES[arithmetic], views * images
    precision = arithmetic if dtype == torch.float32 else None
    correlation = torch.zeros(width, width, device=z[0].device)
    working = None if dtype == torch.float32 else torch.empty_like(correlation, dtype=dtype)
    unit, inverse_norm = unit_embeddings(z, dtype)
    update_correlation_(
        correlation, unit[rows:], decay=0.0, count=2.0 * images, working=working, input_precision=precision
    )
    image = torch.arange(images, device=z[0].device)
    locals_ = image.repeat(views - 2)
    ratio = torch.ones(rows, device=z[0].device)
    ratio[2 * images :] = 0.5
    gradient, terms = unigrad_gradient(
        unit[:rows],
        inverse_norm[:rows],
        unit[rows:],
        correlation if working is None else working,
        balance=BALANCE,
        scale=1 / rows,
        first=torch.cat([image + images, image, locals_]),
        second=torch.cat([image + images, image, locals_ + images]),
        ratio=ratio,
        input_precision=precision,
    )
    return gradient, terms, mirror_(correlation)


def correctness(device: torch.device) -> Iterator[Finding]:
    if device.type == "cuda":
        arithmetics, sizes = tuple(GATES), SIZES_ON_A_GPU
    else:  # the interpreter computes fp32 exactly whatever the setting, and cannot compute bf16
        arithmetics, sizes = ("ieee", "fp16"), ((2, 9, 136), (3, 5, 40))
    for arithmetic in arithmetics:
        worst, worst_torch, symmetric = 0.0, 0.0, True
        for views, images, width in sizes:
            z = embeddings(device, views, images, width, torch.float32)
            gradient, _, correlation = kernels_once(z, arithmetic)
            exact = formula(z, torch.float64, torch.float64)
            with float32_products(arithmetic):
                plain = distance(formula(z, torch.float32, DTYPES[arithmetic]), exact)
            worst, worst_torch = max(worst, distance(gradient, exact)), max(worst_torch, plain)
            symmetric &= torch.equal(correlation, correlation.T)
        bound = min(GATES[arithmetic], max(SLACK * worst_torch, 1e-6))
        if arithmetic in ("tf32", "tf32x3"):  # torch rounds operands to TF32; here the matrix units truncate them
            bound = GATES[arithmetic]
        found = f"{worst:.1e} (gate {GATES[arithmetic]:.0e}, plain torch {worst_torch:.1e})"
        yield Finding(f"error of dz, {arithmetic}", found, worst <= bound and symmetric)


def steps(objective, z: list[Tensor], count: int) -> list[Tensor]:
    """Losses and gradients of several steps on the same embeddings, and F after them."""
    out, online = [], [each.detach().requires_grad_() for each in z[:2]]
    for _ in range(count):
        loss = objective(online=online, target=z[2:]).loss
        out += [loss.detach(), *torch.autograd.grad(loss, online)]
    return [*out, objective.correlation.clone()]


def determinism(device: torch.device) -> Iterator[Finding]:
    arithmetic, images, width = ("bf16", 256, 2048) if device.type == "cuda" else ("fp16", 5, 40)
    repeats = REPEATS if device.type == "cuda" else 3
    z = embeddings(device, 2, images, width, torch.float32)
    first = kernels_once(z, arithmetic)
    equal = sum(all(map(torch.equal, first, kernels_once(z, arithmetic))) for _ in range(repeats))
    yield Finding("repeats that are bitwise equal", f"{equal} of {repeats}", equal == repeats)


def second_stream(device: torch.device) -> Iterator[Finding]:
    """Two objectives running concurrently on two streams give the same results as each alone."""
    z = embeddings(device, 2, 256, 2048, torch.float32)
    expected = steps(fresh_objective(device, 2048, "bf16"), z, 20)
    one, two = fresh_objective(device, 2048, "bf16"), fresh_objective(device, 2048, "bf16")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        aside = steps(two, z, 20)
    here = steps(one, z, 20)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    good = all(map(torch.equal, expected, aside)) and all(map(torch.equal, expected, here))
    yield Finding("a second stream", "bitwise equal" if good else "differs", good)


def cuda_graph(device: torch.device) -> Iterator[Finding]:
    """A replayed CUDA graph of a step updates F and gives gradients like a launched step."""
    width, images = 2048, 256
    launched, replayed = (fresh_objective(device, width, "bf16") for _ in range(2))
    z = embeddings(device, 2, images, width, torch.bfloat16)
    online = [each.requires_grad_() for each in z[:2]]

    def step(objective) -> Tensor:
        loss = objective(online=online, target=z[2:]).loss
        gradients = torch.autograd.grad(loss, online)
        return torch.cat([loss.detach().reshape(1), *(each.float().flatten() for each in gradients)])

    graph, result = captured(lambda: step(replayed))
    step(launched)
    good = True
    for _ in range(3):
        graph.replay()
        good &= torch.equal(step(launched), result)
        good &= torch.equal(launched.correlation, replayed.correlation) and bool(launched.updates == replayed.updates)
    yield Finding("a CUDA graph of a step", "as launched" if good else "differs", good)


def launches(device: torch.device) -> Iterator[Finding]:
    from torch.profiler import ProfilerActivity, profile

    width, images = 2048, 512
    objective = fresh_objective(device, width, "bf16")
    z = embeddings(device, 2, images, width, torch.bfloat16)
    online = [each.requires_grad_() for each in z[:2]]
    ones = torch.ones((), device=device)
    torch.autograd.grad(objective(online=online, target=z[2:]).loss, online, ones)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        torch.autograd.grad(objective(online=online, target=z[2:]).loss, online, ones)
        torch.cuda.synchronize()
    names = [event.name for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    found = f"{len(names)}: {', '.join(name[:30] for name in names)}"
    yield Finding("launches of a step", found, 0 < len(names) <= MOST_LAUNCHES)


def recompilation(device: torch.device) -> Iterator[Finding]:
    """A change of ρ, λ or the number of images (with the same divisibility) compiles nothing."""
    from unigrad_fast.kernels import correlation, gradient, normalize

    functions = (
        normalize.unit_embeddings_kernel,
        correlation.update_correlation_kernel,
        gradient.correlation_product_kernel,
        gradient.embedding_gradient_kernel,
    )

    def compiled() -> int:
        return sum(len(caches[0]) for function in functions for caches in function.device_caches.values())

    steps(fresh_objective(device, 1024, "bf16"), embeddings(device, 2, 64, 1024, torch.float32), 2)
    before = compiled()
    other = fresh_objective(device, 1024, "bf16")
    other.decay, other.balance = 0.5, 3.0
    steps(other, embeddings(device, 2, 96, 1024, torch.float32), 2)
    yield Finding("compilations for other scalars", str(compiled() - before), compiled() == before)


def multi_tensor(device: torch.device) -> Iterator[Finding]:
    """LARS and the target update against plain torch."""
    from unigrad_fast.kernels import multi_tensor as kernels

    generator = torch.Generator().manual_seed(0)
    on_gpu = device.type == "cuda"
    shapes = [(2048, 2048), (512, 256, 3, 3), (1000,), (1,), (17, 3)] if on_gpu else [(40, 33), (17,), (1,)]

    def draw() -> list[Tensor]:
        return [torch.randn(shape, generator=generator).to(device) for shape in shapes]

    weights, gradients, velocities = draw(), draw(), draw()
    exact = []
    for w, g, v in zip(*([x.double() for x in each] for each in (weights, gradients, velocities)), strict=True):
        update = g + 1e-4 * w
        v = 0.9 * v + 0.001 * w.norm() / update.norm() * update
        exact.append(w - 0.3 * v)
    lr = torch.tensor(0.3, dtype=torch.float64, device=device)
    settings = {"lr": lr, "momentum": 0.9, "weight_decay": 1e-4, "trust_coefficient": 0.001, "adapt": True}
    kernels.lars_(weights, gradients, velocities, **settings)
    error = max(map(distance, weights, exact))
    skip = torch.zeros((), device=device)
    before = [each.clone() for each in (*weights, *velocities)]
    kernels.lars_(weights, [g * torch.nan for g in gradients], velocities, **settings, skip=skip + 1, scale=skip + 0.5)
    kept = all(map(torch.equal, (*weights, *velocities), before))
    yield Finding("error of LARS", f"{error:.1e}", error < 1e-6 and kept)

    targets, onlines = draw(), draw()
    exact = [t.double().lerp(o.double(), 0.004) for t, o in zip(targets, onlines, strict=True)]
    dtype = torch.bfloat16 if on_gpu else torch.float16  # the interpreter truncates to bf16
    low = [t.to(dtype) for t in targets]
    momentum = torch.tensor(0.996, dtype=torch.float64, device=device)
    kernels.lerp_(targets, onlines, low, momentum=momentum, skip=skip)
    error = max(map(distance, targets, exact))
    copied = all(torch.equal(each, t.to(each.dtype)) for each, t in zip(low, targets, strict=True))
    yield Finding("the target's copies are its weights, rounded", str(copied), copied)
    before = [each.clone() for each in targets]
    kernels.lerp_(targets, onlines, (), momentum=momentum, skip=skip + 1)
    yield Finding("error of the target update", f"{error:.1e}", error < 1e-6 and all(map(torch.equal, targets, before)))


def times(device: torch.device) -> Iterator[Finding]:
    """Microseconds of each launch and of a step, replayed from CUDA graphs, compared with the roofline."""
    peaks = measure_peaks({"bf16"}, device, 8192, 2**28)
    for width, images in SHAPES:
        yield from times_of(device, peaks, width, images)


def times_of(device: torch.device, peaks: Peaks, width: int, images: int) -> Iterator[Finding]:
    design, z = Design.of("bf16", device), embeddings(device, 2, images, width, torch.bfloat16)
    rows, count = 2 * images, torch.full((), 2.0 * images, device=device)
    decay, ticket = torch.full_like(count, 0.99), torch.zeros((), dtype=torch.int32, device=device)
    flags = torch.empty(2 * rows, dtype=torch.int32, device=device)
    unit, inverse_norm = unit_embeddings(z, torch.bfloat16, flags)
    correlation = torch.zeros(width, width, device=device)
    working = torch.zeros_like(correlation, dtype=torch.bfloat16)
    product = correlation_product(unit[:rows], working)
    objective, online = fresh_objective(device, width, "bf16"), [each.detach().requires_grad_() for each in z[:2]]
    ones = torch.ones((), device=device)
    runs: dict[str, Callable[[], object]] = {
        "unit_embeddings": lambda: unit_embeddings(z, torch.bfloat16, flags),
        "update_correlation": lambda: update_correlation_(
            correlation, unit[rows:], decay=decay, count=count, skip=flags[rows:], working=working
        ),
        "correlation_product": lambda: correlation_product(unit[:rows], working),
        "embedding_gradient": lambda: embedding_gradient(
            product, unit[:rows], inverse_norm[:rows], unit[rows:], balance=BALANCE, scale=1 / rows, ticket=ticket
        ),
        "step": lambda: torch.autograd.grad(objective(online=online, target=z[2:]).loss, online, ones),
    }
    least = {kernel: peaks.kernel_seconds(design, kernel, M, width) for kernel, M in counted(images).items()}
    # Called on its own, this operator copies its argument, the product, which a step does not do.
    least["embedding_gradient"] += 2 * product.nbytes / peaks.copy
    least["step"] = peaks.least_seconds(design, images, width)
    for name, run in runs.items():
        taken = replayed(run)
        found = f"{taken * 1e6:.1f} us, {least[name] / taken:.0%} of the roofline"
        yield Finding(f"{name}, C {width}, N {images}", found, True)


def replayed(run: Callable[[], object], times: int = 20) -> float:
    """Seconds of a run without host time: the mean over replays of a graph with several runs."""
    graph, _ = captured(run, times)
    graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(5):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / (5 * times)


Check = Callable[[torch.device], Iterator[Finding]]
CHECKS: tuple[Check, ...] = (correctness, determinism, multi_tensor, batch_norm, products)
# The interpreter compiles nothing, and has neither streams nor graphs.
GPU_CHECKS: tuple[Check, ...] = (recompilation, second_stream, cuda_graph, launches, target_stream)


def check(device: torch.device) -> Iterator[Finding]:
    yield from findings((*CHECKS, *(GPU_CHECKS if device.type == "cuda" else ())), device)
