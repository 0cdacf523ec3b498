"""`unigrad-fast data synth`, `scan`, `shard`, `presets` and `preview`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from unigrad_fast.commands.requirements import require_dali
from unigrad_fast.config import MOST_THREADS, LocalViewChanges, ViewChanges
from unigrad_fast.runtime.errors import UserError
from unigrad_fast.runtime.limits import require_limits
from unigrad_fast.runtime.validation import AbsolutePath, Node

READ_TIMEOUT = Field(default=60.0, gt=0, le=86_400)


class DataSynth(Node):
    """Draw the built-in labelled JPEG images, with the folders train and val."""

    folder: AbsolutePath
    """New folder for the images."""
    seed: int = Field(default=0, ge=0, le=2**32 - 1)
    """Seed of the drawing; the same seed draws the same files."""


def data_synth(options: DataSynth) -> None:
    from unigrad_fast.images import drawing
    from unigrad_fast.images.drawn_pictures import CLASSES

    folder = drawing.draw(options.folder, options.seed)
    print(f"{len(CLASSES)} classes of drawn images in {folder}/train and {folder}/val")


class DataScan(Node):
    """Decode every image once, and list what training cannot use and what is odd."""

    path: AbsolutePath
    """Images, as `--data.train` takes them."""
    output: AbsolutePath | None = None
    """Folder for the lists; null is scan-NAME in the current folder. An interrupted scan goes on there."""
    threads: int | None = Field(default=None, ge=1, le=MOST_THREADS)
    """Images decoded at once; null is one per core. More of them hide the latency of network storage."""
    read_timeout: float = READ_TIMEOUT
    """Seconds after which a file that does not answer counts as bad."""


def data_scan(options: DataScan) -> None:
    require_dali()
    require_limits()
    from unigrad_fast.images import scan

    scan.scan(**dict(options))


class DataShard(Node):
    """Pack images, shuffled, into tar shards, which network storage reads faster and a start lists at once."""

    source: AbsolutePath
    """Images, as `--data.train` takes them."""
    folder: AbsolutePath
    """New folder for the shards, or one in which the same command was interrupted."""
    images_per_shard: int = Field(default=10_000, ge=1)
    """Images per shard."""
    short_side: int | None = Field(default=None, ge=16)
    """Pixels to which longer short sides are reduced; null copies all images as they are."""
    quality: int = Field(default=90, ge=1, le=100)
    """JPEG quality of the images that are reduced."""
    shuffle_seed: int | None = Field(default=0, ge=0, le=2**32 - 1)
    """Seed of the order in the shards, which is not the files': it mixes the classes, for other readers. So a run on
    them has other batches than one on the files; null keeps the order, and the batches."""
    threads: int | None = Field(default=None, ge=1, le=MOST_THREADS)
    """Threads that decode, resize and encode; null is the cores."""
    read_timeout: float = READ_TIMEOUT
    """Seconds after which a file that does not answer is left out."""
    verify: bool = False
    """Read all shards back and compare them with their digests; of finished shards, do only this."""


def data_shard(options: DataShard) -> None:
    require_limits()
    from unigrad_fast.images import shard
    from unigrad_fast.pipelines.shards.packing import Packing

    if "quality" in options.model_fields_set and options.short_side is None:
        raise UserError(
            f"quality = {options.quality}: images are copied as they are; leave it out, or add --short_side"
        )
    packing = Packing(**{key: getattr(options, key) for key in Packing.__dataclass_fields__})
    shard.shard(options.source, options.folder, packing, options.threads, options.verify, options.read_timeout)


class DataPresets(Node):
    """Show the augmentation presets, their sources, and how to change them."""

    markdown: bool = False
    """Print them as a table for Markdown."""


def data_presets(options: DataPresets) -> None:
    from unigrad_fast.images import preset_table

    preset_table.show(options.markdown)


class DataPreview(Node):
    """Draw the crops and the views that training makes of a few images."""

    path: AbsolutePath
    """Images, as `--data.train` takes them; or a run, or a training recipe, whose images are taken."""
    recipe: str | None = None
    """Training recipe; null is the path's, else the default of `pretrain`."""
    preset: str | None = None
    """Augmentation preset of `data presets`, in place of a recipe's; null is the recipe's."""
    images: int = Field(default=4, ge=1, le=64)
    """How many images: the first ones of the epoch."""
    output: AbsolutePath = Path("preview.png")
    """PNG file to write."""
    overwrite: bool = False
    """Replace a file of that name."""
    seed: int | None = Field(default=None, ge=0, le=2**32 - 1)
    """Seed of order and augmentations; null is the run's or recipe's."""
    epoch: int = Field(default=0, ge=0, le=2**32 - 1)
    """Epoch of the run, from 0."""
    cutmix: bool = False
    """Add the global views after CutMix, as is done anyway for a recipe that mixes."""
    image_size: int | None = Field(default=None, ge=16, le=1024)
    """Height and width of the global views in pixels; null is the recipe's or preset's."""
    local_crops: int | None = Field(default=None, ge=0, le=32)
    """Number of local views; null is the recipe's or preset's."""
    global_views: ViewChanges = ViewChanges()
    """What differs from the preset in both global views."""
    second_view: ViewChanges = ViewChanges()
    """What differs besides in the second of them."""
    local_views: LocalViewChanges = LocalViewChanges()
    """What differs in the local views."""
    photometric: Literal["dali", "torch"] | None = None
    """Colour operations, as `--data.photometric` of a run; null is the run's or recipe's."""


def data_preview(options: DataPreview) -> None:
    require_dali()
    from unigrad_fast.images import preview

    changed = {key: getattr(options, key).given() for key in ("global_views", "second_view", "local_views")}
    preview.preview(**{**dict(options), **changed})
