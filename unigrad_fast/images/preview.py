"""`unigrad-fast data preview`: draws the views that an augmentation makes of a few images."""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from unigrad_fast.images.preview_rows import collect
from unigrad_fast.images.preview_sheet import draw
from unigrad_fast.images.preview_source import find_source
from unigrad_fast.pipelines import Manifest, View
from unigrad_fast.pipelines.presets import GLOBALS
from unigrad_fast.runtime import outputs
from unigrad_fast.runtime.errors import UserError
from unigrad_fast.runtime.wording import count


def preview(
    path: Path,
    output: Path,
    overwrite: bool = False,
    recipe: str | None = None,
    preset: str | None = None,
    images: int = 4,
    seed: int | None = None,
    epoch: int = 0,
    cutmix: bool = False,
    image_size: int | None = None,
    local_crops: int | None = None,
    photometric: str | None = None,
    **changes: Mapping[str, Any],
) -> None:
    """Write the picture, a row per image: the first ones of an epoch's first batch.

    Args:
        path: a run, a training recipe, or images.
        output: PNG file to write.
        overwrite: replace one that exists.
        recipe: a training recipe; None is the path's, or what `pretrain` does by default.
        preset: an augmentation preset, in place of a recipe's.
        images: how many rows; fewer if there are fewer images.
        seed, epoch: seed and epoch of the views; the seed None is the run's or recipe's.
        cutmix: mix the global views even if the recipe does not.
        image_size, local_crops, changes: as in `pipelines.preset_views`.
        photometric: as in `Loader`; None is the run's or recipe's.

    Raises:
        UserError: the output cannot be written, exists, or would be one of the images; a training recipe is wrong; or
            CutMix has no partner.
        DataError: the recipe or the preset does not exist, or an image cannot be used.
    """
    if output.suffix.lower() != ".png":
        raise UserError(f"output = {output}: the preview is a PNG; give a name that ends in .png")
    if not os.path.isdir(output.parent):
        raise UserError(f"output = {output}: the folder {output.parent} does not exist; create it, or give another")
    if os.path.isdir(output):
        raise UserError(f"output = {output}: is a folder; give the name of a file")
    source = find_source(path, recipe, preset, seed, epoch, cutmix, image_size, local_crops, photometric, changes)
    outputs.require_file(output, {"path": source.images})
    views = source.views
    if len(views) == GLOBALS and (local := changes.get("local_views")):
        key, value = next(iter(local.items()))
        raise UserError(f"local_views.{key} = {value}: {source.name} has no local views; add --local_crops")
    if (size := views[-1].size) > views[0].size:
        raise UserError(
            f"local_views.size = {size}: larger than the global views ({views[0].size}); give a smaller one"
        )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        manifest = Manifest.open(source.images)
    for warning in caught:
        print(f"warning: {warning.message}")
    readable = len(manifest) - len(manifest.unreadable())
    rows = collect(manifest, views, min(images, readable), source.seed, epoch, source.cutmix, source.photometric)
    mixed = ["CutMix"] if source.cutmix else []
    title = [source.name, _summary(views), *mixed, f"seed {source.seed}", f"epoch {epoch}"]
    file = io.BytesIO()
    draw(rows, views, title).save(file, "PNG", optimize=True)
    try:
        outputs.write_files({output: file.getvalue()}, overwrite)
    except OSError as error:
        raise UserError(f"output = {output}: cannot be written: {error.strerror}; give another file") from error
    print(f"views of {count(len(rows), 'image')} under {source.name}, in {output}")


def _summary(views: Sequence[View]) -> str:
    sizes = [(number < GLOBALS, view.size) for number, view in enumerate(views)]
    return " + ".join(f"{len(list(same))} × {size} px" for (_, size), same in groupby(sizes))
