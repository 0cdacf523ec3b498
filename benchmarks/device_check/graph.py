"""Training steps launched and replayed from CUDA graphs: time, bitwise equality, and the same with collectives.

The trainer is a run's own, but without a loader: its images are noise on the device. DeepSpeed's engine may be replaced
(see `engine`).

One GPU is a world of one rank, in which nothing is exchanged. For the checks of NCCL it claims to be more: then every
gather, every bucket of gradients and every sum runs through NCCL, in launched steps and in graphs, with the results of
a single rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from unigrad_fast.benchmarks.device_check.engine import available_engine
from unigrad_fast.benchmarks.device_check.finding import Finding
from unigrad_fast.benchmarks.device_check.step import ON_A_GPU, ON_THE_CPU, Size
from unigrad_fast.benchmarks.harness.record import append
from unigrad_fast.benchmarks.harness.turns import distance, seconds, spread, take_turns

WHAT = "training with engine.cuda_graph"
STEPS, SPOILED = 10, 6  # steps, and the one with a non-finite image
ROUNDS, TIMED = 5, 10
WAYS = ("launched", "replayed")
SMALL = Size("resnet18", 32, 32, 512)
CLOSE = 0.05  # relative norm of a difference
COLLECTIVES = ("gather", "reduce")  # that a step on several ranks has, at least
RECORD: Callable | None = None  # captures steps in place of a CUDA graph; without it the CPU launches all of them


class SeveralInName(int):
    """A number of ranks that counts as it is, but is not 1 when compared with it."""

    def __eq__(self, other: object) -> bool:
        return other != 1 and int(self) == other

    def __gt__(self, other: int) -> bool:
        return other == 1 or int(self) > other

    __hash__ = int.__hash__


def several_in_name():
    """A context in which the process group's single rank exchanges what several would, with itself."""
    return mock.patch.object(dist, "get_world_size", lambda group=None: SeveralInName(1))


@contextmanager
def alone(device: torch.device) -> Iterator:
    """The world of one rank on a device, as a run has it; yields it."""
    from unigrad_fast.runtime import process_group
    from unigrad_fast.runtime.precision import fastest_convolutions
    from unigrad_fast.training.step_graph import own_stream

    try:
        world = process_group.start(device.type)
        with available_engine(), fastest_convolutions(device), own_stream(configured(SMALL), world):
            yield world
    finally:
        process_group.stop()


def sizes_on(device: torch.device) -> tuple[Size, ...]:
    return ON_A_GPU if device.type == "cuda" else ON_THE_CPU


def steps(device: torch.device, output: Path | None = None) -> Iterator[Finding]:
    """Times of launched and replayed steps, appended to device_step.jsonl in the folder `output`, if there is one."""
    sizes = sizes_on(device)
    yield from timed_sizes(device, sizes, "training", output)
    yield from timed_sizes(device, sizes[:1], "training in fp16", output, precision="fp16")


def replaying(device: torch.device) -> Iterator[Finding]:
    """Bitwise equality of launched and replayed steps."""
    with alone(device) as world:
        yield equal(world, SMALL if device.type == "cuda" else ON_THE_CPU[0])


def exchanging(device: torch.device, output: Path | None = None) -> Iterator[Finding]:
    """The collectives of a rank that is not alone, through NCCL: their number, results and time."""
    size = SMALL if device.type == "cuda" else ON_THE_CPU[0]
    with alone(device) as world:
        expected, _ = after_steps(make_trainer(world, size, "launched", "small", precision="fp32"), size)
        with several_in_name():
            yield collectives(world, size)
            found, _ = after_steps(make_trainer(world, size, "launched", "small", precision="fp32"), size)
            yield equal(world, size, "replayed steps with collectives")
    # Kernels and orders of summation differ; a wrong share or a missing part would change some tensor by half or more.
    worst = max(distance(found[name], tensor.double()) for name, tensor in expected.items() if tensor.any())
    yield Finding("steps with collectives against none", f"differ by {worst:.1e}, gate {CLOSE:.0e}", worst < CLOSE)
    with several_in_name():
        yield from timed_sizes(device, sizes_on(device)[:1], "training with collectives", output)


def collectives(world, size: Size) -> Finding:
    """How many collectives a launched step has."""
    from unigrad_fast.runtime.collectives import CollectiveSpy

    trainer = make_trainer(world, size, "launched", "small")
    with CollectiveSpy() as spy:
        trainer.step(0, iter([noise(size, 0, world.device)]))
    found = ", ".join(f"{kind} {total.count}" for kind, total in spy.found.items())
    return Finding(f"collectives of a step, {world.backend}", found, all(kind in spy.found for kind in COLLECTIVES))


def timed_sizes(
    device: torch.device, sizes: tuple[Size, ...], what: str, output: Path | None, **engine: object
) -> Iterator[Finding]:
    with alone(device) as world:
        for size in sizes:
            rows: list[dict] = []
            yield timed(world, size, rows, what, **engine)
            if output is not None:
                append(output, "device_step", rows)


def equal(world, size: Size = SMALL, what: str = WHAT) -> Finding:
    """Compare the whole state of a checkpoint after several steps with varying rates, one of them dropped."""
    (expected, *dropped), (found, *others) = (
        after_steps(make_trainer(world, size, way, "small"), size) for way in WAYS
    )
    differing = [name for name, tensor in expected.items() if not torch.equal(tensor, found[name])]
    said = f"{len(differing)} of {len(expected)} tensors differ after {STEPS} steps"
    return Finding(what, ", ".join([said, *differing[:1]]), not differing and dropped == others == [1])


def after_steps(trainer, size: Size) -> tuple[dict[str, Tensor], int]:
    """The state after several steps, and how many of them were dropped.

    The trainer must have the small stem, because the backward pass of torch's pooling sums in no fixed order.
    """
    from unigrad_fast.training import checkpoint

    deterministic = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    try:
        for step in range(STEPS):
            trainer.step(step, iter([noise(size, step, trainer.world.device)]))
        return {each.name: each.tensor.clone() for each in checkpoint.state(trainer)}, trainer.gate.check(STEPS)
    finally:
        torch.backends.cudnn.deterministic = deterministic


def timed(world, size: Size, rows: list[dict], what: str = "training", **engine: object) -> Finding:
    """Time steps of both in turns; appends rows to `rows`."""
    batches = itertools.repeat(noise(size, 0, world.device))
    trainers = {way: make_trainer(world, size, way, **engine) for way in WAYS}
    rounds, steps = (ROUNDS, TIMED) if world.device.type == "cuda" else (1, 1)

    def block(trainer) -> Callable[[], float]:
        def step() -> None:
            trainer.step(trainer.steps_done, batches)
            trainer.gate.check(trainer.steps_done - 1)

        return lambda: seconds(step, world.device, steps)

    for trainer in trainers.values():
        for step in range(STEPS):  # enough for one of them to replay
            trainer.step(step, batches)
    blocks = take_turns({way: block(trainer) for way, trainer in trainers.items()}, rounds)
    where = f"{size.backbone}, {size.side} px, {size.images} images"
    engine = type(trainers[WAYS[0]].online).__name__
    medians = {}
    for way, measured in blocks.items():
        row = spread([1e3 * each for each in measured])
        medians[way] = row["median"]
        rows.append({"what": f"{what}, {way}", "unit": "ms", "case": where, "engine": engine, **row})
    said = ", ".join(f"{way} {ms:.1f} ms, {1e3 * size.images / ms:,.0f} images/s" for way, ms in medians.items())
    return Finding(f"{what}, {where}", f"{said} ({engine})", True)


def configured(size: Size, stem: str = "imagenet", **engine: object):
    from unigrad_fast.config import resolve

    tree = {
        "output": "/nowhere",
        "data": {"train": "/nowhere", "batch_size": size.images, "image_size": size.side},
        "model": {"backbone": size.backbone, "stem": stem, "projector": {"width": size.width}},
        "engine": {"cuda_graph": True, **engine},
    }
    return resolve("imagenet_100ep", tree)


def make_trainer(world, size: Size, way: str, stem: str = "imagenet", **engine: object):
    """A trainer without images whose steps are launched or replayed."""
    from unigrad_fast.training import trainer as training
    from unigrad_fast.training.step_graph import StepGraph

    config = configured(size, stem, cuda_graph=False, **engine)  # set up below instead, on any device
    with (
        mock.patch.object(training, "BadImages"),
        mock.patch.object(training, "identity"),
        mock.patch.object(training, "build_loader", return_value=SimpleNamespace(steps_per_epoch=4)),
    ):
        trainer = training.Trainer(config, world, None)
    if way == "replayed" and (RECORD is not None or world.device.type == "cuda"):
        parts = trainer.online, trainer.objective, trainer.phases, world.device
        trainer.compute = StepGraph(trainer.on_device, *parts, RECORD)
    return trainer


def noise(size: Size, step: int, device: torch.device):
    """A step's batch."""
    from unigrad_fast.pipelines import Batch

    generator = torch.Generator(device).manual_seed(step)
    shape = (size.images, 3, size.side, size.side)
    views = [torch.randn(shape, generator=generator, device=device) for _ in range(2)]
    views = [view.contiguous(memory_format=torch.channels_last) for view in views]
    if step == SPOILED:
        views[0][0, 0, 0, 0] = torch.nan
    nothing = torch.zeros(size.images, dtype=torch.int64)
    return Batch(views, index=nothing, label=nothing, step=step, replaced=nothing.bool())
