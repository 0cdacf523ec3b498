"""Compares training with replayed CUDA graphs and with launched steps on a GPU: bitwise equality and time.

The trainer is a run's own, including DeepSpeed, but without a loader: its images are noise on the device.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch

from unigrad_fast.benchmarks.device_check.finding import Finding
from unigrad_fast.benchmarks.device_check.step import ON_A_GPU, Size
from unigrad_fast.benchmarks.harness.record import append
from unigrad_fast.benchmarks.harness.turns import seconds, spread, take_turns

WHAT = "training with engine.cuda_graph"
STEPS, SPOILED = 10, 6  # steps, and the one with a non-finite image
ROUNDS, TIMED = 5, 10
WAYS = ("launched", "replayed")
SMALL = Size("resnet18", 32, 32, 512)


def check(device: torch.device, output: Path | None = None) -> Iterator[Finding]:
    """All findings; times are appended to device_step.jsonl in the folder `output`, if there is one."""
    if device.type != "cuda":
        return
    try:
        from unigrad_fast.runtime import process_group
        from unigrad_fast.training import trainer  # noqa: F401
        from unigrad_fast.training.step_graph import own_stream
    except ModuleNotFoundError as error:
        yield Finding(WHAT, f"not checked: {error.name} is not installed", True)
        return
    rows: list[dict] = []
    with process_group.session("cuda") as world, own_stream(configured(SMALL), world):
        yield equal(world)
        for size in ON_A_GPU:
            yield timed(world, size, rows)
    if output is not None:
        append(output, "device_step", rows)


def equal(world, size: Size = SMALL, record: Callable | None = None) -> Finding:
    """Compare the whole state of a checkpoint after several steps with varying rates, one of them dropped.

    Uses the small stem, because the backward pass of torch's pooling sums in no fixed order.
    """
    from unigrad_fast.training import checkpoint

    deterministic = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    try:
        trainers = [make_trainer(world, size, way, record, "small") for way in WAYS]
        for trainer in trainers:
            for step in range(STEPS):
                trainer.step(step, iter([noise(size, step, world.device)]))
        launched, replayed = ({each.name: each.tensor for each in checkpoint.state(t)} for t in trainers)
        differing = [name for name, tensor in launched.items() if not torch.equal(tensor, replayed[name])]
        dropped = {trainer.gate.check(STEPS) for trainer in trainers}
    finally:
        torch.backends.cudnn.deterministic = deterministic
    found = f"{len(differing)} of {len(launched)} tensors differ after {STEPS} steps"
    return Finding(WHAT, ", ".join([found, *differing[:1]]), not differing and dropped == {1})


def timed(world, size: Size, rows: list[dict], record: Callable | None = None) -> Finding:
    """Time steps of both in turns; appends rows to `rows`."""
    batches = itertools.repeat(noise(size, 0, world.device))
    trainers = {way: make_trainer(world, size, way, record) for way in WAYS}

    def block(trainer) -> Callable[[], float]:
        def step() -> None:
            trainer.step(trainer.steps_done, batches)
            trainer.gate.check(trainer.steps_done - 1)

        return lambda: seconds(step, world.device, TIMED)

    for trainer in trainers.values():
        for step in range(STEPS):  # enough for one of them to replay
            trainer.step(step, batches)
    blocks = take_turns({way: block(trainer) for way, trainer in trainers.items()}, ROUNDS)
    where = f"{size.backbone}, {size.side} px, {size.images} images"
    medians = {}
    for way, measured in blocks.items():
        row = spread([1e3 * each for each in measured])
        medians[way] = row["median"]
        rows.append({"what": f"training, {way}", "unit": "ms", "case": where, **row})
    return Finding(f"{WHAT}, {where}", ", ".join(f"{way} {ms:.1f} ms" for way, ms in medians.items()), True)


def configured(size: Size, stem: str = "imagenet"):
    from unigrad_fast.config import resolve

    tree = {
        "output": "/nowhere",
        "data": {"train": "/nowhere", "batch_size": size.images, "image_size": size.side},
        "model": {"backbone": size.backbone, "stem": stem, "projector": {"width": size.width}},
        "engine": {"cuda_graph": True},
    }
    return resolve("imagenet_100ep", tree)


def make_trainer(world, size: Size, way: str, record: Callable | None, stem: str = "imagenet"):
    """A trainer without images whose steps are launched or replayed."""
    from unigrad_fast.training import trainer as training
    from unigrad_fast.training.step_graph import StepGraph

    config = configured(size, stem)
    engine = config.engine.model_copy(update={"cuda_graph": False})  # set up below instead, on any device
    with (
        mock.patch.object(training, "BadImages"),
        mock.patch.object(training, "identity"),
        mock.patch.object(training, "build_loader", return_value=SimpleNamespace(steps_per_epoch=4)),
    ):
        trainer = training.Trainer(config.model_copy(update={"engine": engine}), world, None)
    if way == "replayed":
        parts = trainer.online, trainer.objective, trainer.phases, world.device
        trainer.compute = StepGraph(trainer.on_device, *parts, record)
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
