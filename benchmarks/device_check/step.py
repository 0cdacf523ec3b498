"""The training step on a device: waits of the host, a replayed graph against launched steps, times by part.

A step is the device's part of `training.Trainer.step`, without loader, reports and DeepSpeed: target branch, online
branch, objective with its update of F, backward, SGD, target update. Its time, whole and by part, is compared with the
same step with one pass per view, with torchvision's networks and torch's norms, and with only the networks.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unigrad_fast.benchmarks.device_check.finding import Finding
from unigrad_fast.benchmarks.harness.record import append
from unigrad_fast.benchmarks.harness.turns import seconds, spread, synchronize, take_turns

PARTS = ("target", "online", "objective", "backward", "optimizer", "target update")
VARIANTS = ("ours", "a pass for each view", "torch's norms", "networks alone")
ROUNDS, STEPS, WARMUP = 5, 10, 5
RANKS = 2
REPEATS = 20  # steps of both branches
START = "spawn"  # how ranks start; a forked process cannot use a GPU

Result = TypeVar("Result")


@dataclass(frozen=True)
class Size:
    """A network and its input: `images` per rank, with `side` pixels per side."""

    backbone: str
    side: int
    images: int
    width: int


ON_A_GPU = (Size("resnet50", 224, 128, 2048), Size("resnet50", 224, 64, 2048), Size("resnet50", 224, 32, 2048))
ON_THE_CPU = (Size("resnet18", 32, 4, 32),)


def variants(device: torch.device, output: Path | None = None) -> Iterator[Finding]:
    """Times of all variants by part; appended to device_step.jsonl in the folder `output`, if there is one."""
    for size in ON_A_GPU[:2] if device.type == "cuda" else ON_THE_CPU:
        rows: list[dict[str, Any]] = []
        yield from times(device, size, rows)
        if output is not None:
            append(output, "device_step", rows)


def networks(device: torch.device) -> Iterator[Finding]:
    """Waits of the host on two ranks, and a replayed graph of the networks."""
    small = Size("resnet50", 224, 16, 2048) if device.type == "cuda" else ON_THE_CPU[0]
    if device.type == "cuda":
        yield graph(device, small)
    yield from waits(device, small)


class Step:
    """A step of one of `VARIANTS`, on images in memory.

    Attributes:
        moments: events at the ends of the last step's parts, if `timed`.
    """

    def __init__(self, variant: str, size: Size, device: torch.device):
        from unigrad_fast.config import resolve
        from unigrad_fast.networks.encoder import build_encoder
        from unigrad_fast.objectives import UniGrad
        from unigrad_fast.optimization.sgd import SGD
        from unigrad_fast.training.target import make_copies, make_target

        settings = {"backbone": size.backbone, "projector": {"width": size.width}}
        self.device, self.alone = device, variant == "networks alone"
        config = resolve("imagenet_100ep", {"model": settings})
        if variant == "torch's norms":
            online = TorchsEncoder(config, synchronised=device.type == "cuda")
        else:
            online = build_encoder(config.model, config.seed, device)
        if variant == "a pass for each view":
            online.one_pass = False
        self.online = online.to(device, memory_format=torch.channels_last).train()
        self.target = make_target(self.online)
        self.objective = UniGrad(size.width, most_images=size.images).to(device)
        self.optimizer = SGD(self.online.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
        generator = torch.Generator().manual_seed(0)
        views = (torch.randn(size.images, 3, size.side, size.side, generator=generator) for _ in range(2))
        self.views = [view.to(device, memory_format=torch.channels_last) for view in views]
        self.dtype = torch.bfloat16 if device.type == "cuda" else None
        self.copies = make_copies(self.target, self.dtype)
        self.timed = False
        self.moments: list[torch.cuda.Event] = []

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not None)

    def forward(self) -> tuple[list[Tensor], list[Tensor]]:
        from unigrad_fast.training.target import embed

        with self.autocast():
            with torch.no_grad():
                target = embed(self.target, self.copies, self.views)
            self.mark()
            online = self.online(self.views)
        self.mark()
        return online, target

    def __call__(self) -> Tensor:
        """The loss."""
        from unigrad_fast.training.target import update_target_

        self.moments.clear()
        self.mark()
        self.optimizer.zero_grad(set_to_none=True)
        self.optimizer.open()
        online, target = self.forward()
        if self.alone:
            loss = torch.stack([embedding.float().mean() for embedding in online]).sum()
            self.mark()
            loss.backward()
            return loss.detach()
        with self.autocast():
            output = self.objective(online=online, target=target)
        torch.maximum(self.optimizer.nonfinite, output.nonfinite.float(), out=self.optimizer.nonfinite)
        self.mark()
        output.loss.backward()
        if dist.is_initialized() and dist.get_world_size() > 1:
            for parameter in self.online.parameters():
                dist.all_reduce(parameter.grad)
        self.mark()
        self.optimizer.step()
        self.mark()
        update_target_(self.target, self.online, 0.996, skip=self.optimizer.nonfinite, copies=self.copies)
        self.mark()
        return output.loss.detach()

    def mark(self) -> None:
        if self.timed and self.device.type == "cuda":
            self.moments.append(torch.cuda.Event(enable_timing=True))
            self.moments[-1].record()

    def milliseconds(self, steps: int) -> dict[str, float]:
        """Mean milliseconds of a step and, on a GPU, of its parts."""
        self.timed = True
        sums = dict.fromkeys(("step", *PARTS), 0.0)
        for _ in range(steps):
            self()
            synchronize(self.device)
            for part, (begin, end) in zip(PARTS, itertools.pairwise(self.moments), strict=False):
                sums[part] += begin.elapsed_time(end)
        self.timed = False
        if self.device.type == "cuda":
            sums["step"] = 1e3 * steps * seconds(self, self.device, steps)
        return {part: total / steps for part, total in sums.items() if total}


class TorchsEncoder(nn.Module):
    """The same networks with torchvision's modules and torch's norms, and one pass per view.

    Args:
        synchronised: whether the norms are torch's synchronised ones, which the CPU does not support.
    """

    def __init__(self, config, synchronised: bool):
        from unigrad_fast.networks.backbones import build_backbone
        from unigrad_fast.networks.encoder import build_projector

        super().__init__()
        torch.manual_seed(config.seed)
        backbone = build_backbone(config.model.backbone, config.model.stem)
        layers = nn.Sequential(backbone, build_projector(backbone.feature_dim, config.model.projector))
        self.layers = nn.SyncBatchNorm.convert_sync_batchnorm(layers) if synchronised else layers

    def forward(self, views: list[Tensor]) -> list[Tensor]:
        return [self.layers(view) for view in views]


def times(device: torch.device, size: Size, rows: list[dict[str, Any]]) -> Iterator[Finding]:
    """Milliseconds of all variants in turns, on one rank; rows are added to `rows`."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.backends.cudnn.benchmark = True
        torch.cuda.empty_cache()
    warmup, count, rounds = (WARMUP, STEPS, ROUNDS) if on_gpu else (1, 1, 1)
    steps = {variant: Step(variant, size, device) for variant in VARIANTS}
    for step in steps.values():
        for _ in range(warmup):
            step()
    blocks = take_turns({name: partial(step.milliseconds, count) for name, step in steps.items()}, rounds)
    where = f"{size.backbone}, {size.side} px, {size.images} images"
    for name, measured in blocks.items():
        if not on_gpu:
            yield Finding(f"{name}, {where}", "ran", True)
            continue
        for part in measured[0]:
            row = spread([each[part] for each in measured])
            rows.append({"what": f"{name}: {part}", "unit": "ms", "case": where, **row})
        whole, ceiling = (median(each["step"] for each in some) for some in (measured, blocks["networks alone"]))
        parts = ", ".join(f"{part} {median(each[part] for each in measured):.1f}" for part in measured[0])
        found = f"{size.images / whole * 1e3:,.0f} images/s, {ceiling / whole:.0%} of the networks alone; ms: {parts}"
        yield Finding(f"{name}, {where}", found, True)


def captured(
    run: Callable[[], Result], times: int = 1, error_mode: str = "global"
) -> tuple[torch.cuda.CUDAGraph, Result]:
    """A CUDA graph of a function, and the result that each replay overwrites; the function first runs once uncaptured.

    Args:
        run: the function; its first run may compile, and allocate persistent memory.
        times: number of runs in the graph.
        error_mode: `capture_error_mode` of `torch.cuda.graph`.
    """
    stream = torch.cuda.Stream()  # also of the capture, because kernels keep memory by stream
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode=error_mode):
        for _ in range(times):
            result = run()
    return graph, result


def graph(device: torch.device, size: Size) -> Finding:
    """Check that the networks of a replayed CUDA graph give the same results as launched ones."""
    from unigrad_fast.training.target import refresh_

    launched, replayed = Step("networks alone", size, device), Step("networks alone", size, device)
    replayed.online.load_state_dict(launched.online.state_dict())
    replayed.target.load_state_dict(launched.target.state_dict())
    refresh_(replayed.copies, replayed.target)

    def run(step: Step) -> Tensor:
        online, target = step.forward()
        loss = torch.stack([embedding.float().square().mean() for embedding in online]).sum()
        gradients = torch.autograd.grad(loss, list(step.online.parameters()))
        return torch.cat([*(z.detach().float().flatten() for z in (*online, *target)), gradients[0].flatten()])

    run(launched)
    recorded, result = captured(lambda: run(replayed), error_mode="thread_local")
    worst = 0.0
    for _ in range(3):
        recorded.replay()
        expected = run(launched)
        worst = max(worst, ((result - expected).norm() / expected.norm()).item())
    buffers = zip(launched.online.buffers(), replayed.online.buffers(), strict=True)
    moved = all(torch.allclose(a.double(), b.double(), rtol=1e-4, atol=1e-5) for a, b in buffers)
    return Finding("a CUDA graph of the networks", f"differs by {worst:.1e}, gate 1e-3", worst < 1e-3 and moved)


def waits(device: torch.device, size: Size) -> Iterator[Finding]:
    """Count the host's waits in a step on each of two ranks, over gloo because NCCL refuses two ranks on one GPU."""
    variants = ("ours", "torch's norms") if device.type == "cuda" else ("ours",)
    with TemporaryDirectory() as folder:
        for variant in variants:
            context = multiprocessing.get_context(START)
            with context.Manager() as manager:
                found = manager.dict()
                rendezvous = str(Path(folder) / f"{len(variant)}")
                arguments = (rendezvous, variant, size, str(device), found)
                ranks = [context.Process(target=count_waits, args=(rank, *arguments)) for rank in range(RANKS)]
                for rank in ranks:
                    rank.start()
                for rank in ranks:
                    rank.join(300)
                    if rank.is_alive():
                        rank.kill()
                counts = [found.get(rank) for rank in range(RANKS)]
            said = f"{' and '.join(map(str, counts))} a step on {RANKS} ranks"
            good = all(isinstance(count, int) for count in counts) and (variant != "ours" or not any(counts))
            yield Finding(f"waits of the host, {variant}", said, good)


def count_waits(rank: int, rendezvous: str, variant: str, size: Size, device: str, found: Any) -> None:
    """In its own process: count how often torch reports that an operator made the host wait; or record the error."""
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=RANKS)
        step = Step(variant, size, torch.device(device))
        step()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            step()
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
            torch.cuda.synchronize()
        found[rank] = sum("synchroniz" in str(each.message) for each in said)
        dist.destroy_process_group()
    except Exception as error:
        found[rank] = f"{type(error).__name__}: {error}"[:200]


def target_stream(
    device: torch.device, backbone: str = "resnet50", images: int = 32, side: int = 224
) -> Iterator[Finding]:
    """Check that embeddings and running buffers are bitwise equal with and without `engine.target_stream`."""
    from unigrad_fast.config import resolve
    from unigrad_fast.networks.encoder import build_encoder
    from unigrad_fast.runtime.process_group import World
    from unigrad_fast.training.target import embed, make_copies, make_target
    from unigrad_fast.training.target_stream import TargetStream

    settings = {"model": {"backbone": backbone, "projector": {"width": 512}}, "engine": {"target_stream": True}}
    config = resolve("imagenet_100ep", settings)
    world = World(0, 1, 0, 1, device, "nccl")
    generator = torch.Generator().manual_seed(0)
    views = [torch.randn(images, 3, side, side, generator=generator).to(device) for _ in range(2)]
    views = [view.contiguous(memory_format=torch.channels_last) for view in views]

    def run(engine) -> list[Tensor]:
        stream = TargetStream(engine, config.model, world)
        online = build_encoder(config.model, 0, device).to(memory_format=torch.channels_last)
        target = make_target(online)
        copies, results = make_copies(target, torch.bfloat16), []
        for _ in range(REPEATS):
            with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
                inputs = [view + 0 for view in views]  # freed while the target may still read them
                with stream.beside(inputs):
                    ours = embed(target, copies, inputs)
                inputs = [view.flip(3) for view in inputs]
                theirs = online(inputs)
                stream.join()
            results += [*ours, *theirs]
        return [*results, *target.buffers(), *online.buffers()]

    deterministic = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    try:
        alone = run(config.engine.model_copy(update={"target_stream": False}))
        pairs = zip(alone, run(config.engine), strict=True)
        differing = sum(not torch.equal(expected, found) for expected, found in pairs)
    finally:
        torch.backends.cudnn.deterministic = deterministic
    yield Finding("the target branch on its own stream", f"{differing} tensors differ", differing == 0)
