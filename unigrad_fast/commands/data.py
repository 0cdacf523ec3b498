"""`unigrad-fast data synth`, `scan`, `shard`, `presets` and `preview`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from unigrad_fast.commands.requirements import require_dali
from unigrad_fast.config import MOST_THREADS, LocalViewChanges, ViewChanges
from unigrad_fast.runtime.errors import UserError
from unigrad_fast.runtime.limits import require_limits
from unigrad_fast.runtime.validation import AbsolutePath, ImageSource, Node

READ_TIMEOUT = Field(default=60.0, gt=0, le=86_400)


class DataSynth(Node):
    """Draw the built-in labelled JPEG images into folders train and val."""

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
    """Decode every image once, and list images that are unusable or unusual."""

    path: ImageSource
    """Images, as `--data.train` takes them."""
    output: AbsolutePath | None = None
    """Folder for the lists; null is scan-NAME in the current folder. An interrupted scan continues there."""
    threads: int | None = Field(default=None, ge=1, le=MOST_THREADS)
    """Images to decode at once; null is one per core. More of them hide the latency of network storage."""
    read_timeout: float = READ_TIMEOUT
    """Seconds after which a file that does not answer counts as bad."""


def data_scan(options: DataScan) -> None:
    require_dali()
    require_limits()
    from unigrad_fast.images import scan

    scan.scan(**dict(options))


class DataShard(Node):
    """Pack images, shuffled, into tar shards: faster to read from network storage, and to list at the start."""

    source: ImageSource
    """Images, as `--data.train` takes them."""
    folder: AbsolutePath
    """New folder for the shards, or the folder of the same command that was interrupted."""
    images_per_shard: int = Field(default=10_000, ge=1)
    """Images per shard."""
    short_side: int | None = Field(default=None, ge=16)
    """Largest short side in pixels; larger images are shrunk. null copies all images unchanged."""
    quality: int = Field(default=90, ge=1, le=100)
    """JPEG quality of images that are shrunk."""
    shuffle_seed: int | None = Field(default=0, ge=0, le=2**32 - 1)
    """Seed of the shuffled order in the shards, which mixes the classes for other readers. With it, a run on the shards
    has other batches than a run on the files; null keeps the order of the files, and the batches."""
    threads: int | None = Field(default=None, ge=1, le=MOST_THREADS)
    """Threads that decode, resize and encode; null is the number of cores."""
    read_timeout: float = READ_TIMEOUT
    """Seconds after which a file that does not answer is left out."""
    verify: bool = False
    """Read all shards back and compare them with their digests; if the shards are finished, do only this."""


def data_shard(options: DataShard) -> None:
    require_limits()
    from unigrad_fast.images import shard
    from unigrad_fast.pipelines.shards.packing import Packing

    if "quality" in options.model_fields_set and options.short_side is None:
        raise UserError(f"quality = {options.quality}: images are copied unchanged; leave it out, or add --short_side")
    packing = Packing(**{key: getattr(options, key) for key in Packing.__dataclass_fields__})
    shard.shard(options.source, options.folder, packing, options.threads, options.verify, options.read_timeout)


class DataPresets(Node):
    """Show the augmentation presets, their sources, and how to change them."""

    markdown: bool = False
    """Print them as a Markdown table."""


def data_presets(options: DataPresets) -> None:
    from unigrad_fast.images import preset_table

    preset_table.show(options.markdown)


class DataPreview(Node):
    """Draw the crops and the views that training makes of a few images."""

    path: ImageSource
    """Images, as `--data.train` takes them; or a run or a training recipe, with its images."""
    recipe: str | None = None
    """Training recipe; null is the path's, else the default of `pretrain`."""
    preset: str | None = None
    """Augmentation preset of `data presets`, in place of a recipe's; null is the recipe's."""
    images: int = Field(default=4, ge=1, le=64)
    """Number of images: the first ones of the epoch."""
    output: AbsolutePath = Path("preview.png")
    """PNG file to write."""
    overwrite: bool = False
    """Replace an existing file."""
    seed: int | None = Field(default=None, ge=0, le=2**32 - 1)
    """Seed of order and augmentations; null is the run's or recipe's."""
    epoch: int = Field(default=0, ge=0, le=2**32 - 1)
    """Epoch of the run, from 0."""
    cutmix: bool = False
    """Also show the global views after CutMix; a recipe with CutMix always shows them."""
    image_size: int | None = Field(default=None, ge=16, le=1024)
    """Height and width of the global views in pixels; null is the recipe's or preset's."""
    local_crops: int | None = Field(default=None, ge=0, le=32)
    """Number of local views; null is the recipe's or preset's."""
    global_views: ViewChanges = ViewChanges()
    """Changes to both global views."""
    second_view: ViewChanges = ViewChanges()
    """Further changes to the second global view."""
    local_views: LocalViewChanges = LocalViewChanges()
    """Changes to the local views."""
    photometric: Literal["dali", "torch"] | None = None
    """Colour operations, like `data.photometric` of a run; null is the run's or recipe's."""


def data_preview(options: DataPreview) -> None:
    require_dali()
    from unigrad_fast.images import preview

    changed = {key: getattr(options, key).given() for key in ("global_views", "second_view", "local_views")}
    preview.preview(**{**dict(options), **changed})
