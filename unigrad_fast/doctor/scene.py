"""The images, the configuration and the loader for trying the parts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from unigrad_fast.config import Config, resolve

if TYPE_CHECKING:
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
