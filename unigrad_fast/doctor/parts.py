"""The parts of a training step, tried one by one. The function of a part builds it and returns a callable."""

from __future__ import annotations

import itertools
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from unigrad_fast.config import Config, resolve
from unigrad_fast.doctor import Finding, first_line

if TYPE_CHECKING:
    import torch

    from unigrad_fast.pipelines import Manifest
    from unigrad_fast.runtime.process_group import World

IMAGES_PER_RANK = 16
STEPS = 2  # each part runs twice: the first call builds and compiles, the second shows its time


class Scene(NamedTuple):
    """The input of the parts: the quickstart's configuration with a small batch of generated images."""

    config: Config
    world: World
    manifest: Manifest


def prepare(world: World, folder: Path) -> Scene:
    """Write JPEG files, identical on all ranks, into a folder of this rank."""
    import numpy as np
    from PIL import Image

    from unigrad_fast.pipelines import Manifest

    batch = IMAGES_PER_RANK * world.size
    coarse = np.random.default_rng(0).integers(0, 256, (batch, 8, 8, 3), np.uint8)
    (folder / "images").mkdir()
    for number, colours in enumerate(coarse):
        image = Image.fromarray(colours).resize((320, 240), Image.Resampling.BICUBIC)
        image.save(folder / f"images/{number:05}.jpg", quality=90)
    tree = {
        "output": folder / "run",
        "data": {"train": folder / "images", "val": None, "batch_size": batch},
        "schedule": {"epochs": STEPS, "warmup_epochs": 0},
        "telemetry": {"tensorboard": False},
    }
    return Scene(resolve("quickstart", tree), world, Manifest.from_folder(folder / "images", cache=folder / "cache"))


def make_loader(scene: Scene):
    from unigrad_fast.pipelines import Loader

    config, world, manifest = scene
    return Loader(
        manifest,
        config.data.preset,
        config.data.batch_size,
        rank=world.rank,
        world_size=world.size,
        device=world.device,
        image_size=config.data.image_size,
        prefetch=1,  # otherwise the second batch would already be ready when timed
    )


def loading(scene: Scene) -> Callable[[], object]:
    batches = make_loader(scene).iterate()
    return lambda: check_finite(next(batches).views[0])


def model_forward(scene: Scene) -> Callable[[], object]:
    import torch

    from unigrad_fast.networks.encoder import build_encoder
    from unigrad_fast.runtime.precision import autocast_dtype

    config, world, _ = scene
    encoder, dtype = build_encoder(config.model, config.seed, world.device), autocast_dtype("auto", world.device)
    views = [_random(scene, 3, config.data.image_size, config.data.image_size) for _ in range(2)]

    def work() -> None:
        with torch.no_grad(), torch.autocast(world.device.type, dtype, enabled=dtype is not None):
            check_finite(encoder(views)[0])

    return work


def objective(scene: Scene) -> Callable[[], object]:
    from unigrad_fast.objectives import build

    settings, width = scene.config.objective, scene.config.model.projector.width
    built = build(settings.method, width=width, balance=settings.balance, decay=settings.decay).to(scene.world.device)
    online, target = ([_random(scene, width) for _ in range(2)] for _ in range(2))
    for embedding in online:
        embedding.requires_grad_()

    def work() -> None:
        built(online=online, target=target).loss.backward()
        check_finite(online[0].grad)

    return work


def batch_norm(scene: Scene) -> Callable[[], object]:
    from torch import nn

    from unigrad_fast.networks.batch_norm import convert

    layer = nn.BatchNorm1d(512).to(scene.world.device)
    convert(layer)
    x = _random(scene, 512).requires_grad_()

    def work() -> None:
        layer(x).square().mean().backward()
        check_finite(x.grad)

    return work


def all_reduce(scene: Scene) -> Callable[[], object]:
    import torch
    import torch.distributed as dist

    def work() -> None:
        numbers = torch.ones(2**20, device=scene.world.device)
        dist.all_reduce(numbers)
        if (numbers != scene.world.size).any():
            raise RuntimeError(f"the sum of {scene.world.size} ones is not {scene.world.size}")

    return work


def training_step(scene: Scene) -> Callable[[], object]:
    from unigrad_fast.training.trainer import Trainer

    trainer, steps = Trainer(*scene), itertools.count()
    batches = trainer.loader.iterate(stop_step=STEPS * trainer.accumulation)

    def work() -> None:
        trainer.step(next(steps), batches)
        check_finite(trainer.objective.correlation)

    return work


def saving(scene: Scene) -> Callable[[], object]:
    folder = "." if os.access(".", os.W_OK) else None

    def work() -> None:
        with tempfile.NamedTemporaryFile(prefix=".unigrad-doctor-", dir=folder) as file:
            file.write(os.urandom(2**20))
            file.flush()
            os.fsync(file.fileno())

    return work


def _random(scene: Scene, *shape: int) -> torch.Tensor:
    """[IMAGES_PER_RANK, *shape] on the device, images channels-last."""
    import torch

    numbers = torch.randn(IMAGES_PER_RANK, *shape, generator=torch.Generator().manual_seed(0))
    layout = torch.channels_last if len(shape) == 3 else torch.contiguous_format
    return numbers.to(scene.world.device, memory_format=layout)


def check_finite(tensor: torch.Tensor) -> None:
    if not tensor.isfinite().all():
        raise RuntimeError("the result is not finite")


TRACEBACK = "`unigrad-fast doctor --verbose true` shows where"
NETWORK = "check GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME; NCCL_DEBUG=INFO says more"
FITTING = f"torch must be built for this GPU and driver, and the GPU must be free (`nvidia-smi`); {TRACEBACK}"


class TriedPart(NamedTuple):
    """The builder of a part, the optional packages that it needs, and what to do if it fails."""

    build: Callable[[Scene], Callable[[], object]]
    needs: set[str]
    remedy: str


PARTS = {
    "decode, augment": TriedPart(loading, {"DALI"}, f"on a GPU, --data.decode cpu may work; {TRACEBACK}"),
    "model forward": TriedPart(model_forward, set(), FITTING),
    "objective": TriedPart(objective, set(), FITTING),
    "batch norm": TriedPart(batch_norm, set(), FITTING),
    "all-reduce": TriedPart(all_reduce, set(), NETWORK),
    "training step": TriedPart(training_step, {"DALI", "DeepSpeed"}, TRACEBACK),
    "save a file": TriedPart(saving, set(), "free space on the disk (`df -h .`), or use another folder"),
}


def attempt(scene: Scene, unusable: set[str], verbose: bool = False) -> list[Finding]:
    """Try each part, and continue after one that fails.

    With several ranks, stop there: the others wait for this rank in a collective until it ends.
    """
    found = []
    for name, part in PARTS.items():
        if lacking := part.needs & unusable:
            found.append(Finding(name, f"needs {' and '.join(sorted(lacking))}", "skipped"))
            continue
        try:
            found.append(Finding(name, times=_timed_twice(part.build, scene)))
        except Exception as error:
            if verbose:
                traceback.print_exc()
            found.append(Finding(name, first_line(error), "failed", part.remedy))
            if scene.world.size > 1:
                break
    return found


def _timed_twice(build: Callable[[Scene], Callable[[], object]], scene: Scene) -> tuple[float, ...]:
    """Milliseconds of the first call, including building, and of the second call."""
    times, work = [], None
    for _ in range(STEPS):
        began = time.perf_counter()
        work = work or build(scene)
        work()
        if scene.world.device.type == "cuda":
            import torch

            torch.cuda.synchronize(scene.world.device)
        times.append(1000 * (time.perf_counter() - began))
    return tuple(times)
