"""`unigrad-fast data preview`: draws the views that an augmentation makes of a few images."""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from unigrad_fast.config import resolve
from unigrad_fast.images.preview_rows import collect
from unigrad_fast.images.preview_sheet import draw
from unigrad_fast.pipelines import PRESETS, CutMix, Manifest, View
from unigrad_fast.pipelines.presets import GLOBALS, preset_views
from unigrad_fast.pipelines.spelling import is_there
from unigrad_fast.recipes import DEFAULT_RECIPE, recipe_names, title
from unigrad_fast.runtime import outputs
from unigrad_fast.runtime.errors import DataError, UserError
from unigrad_fast.runtime.files import require_folder
from unigrad_fast.runtime.older_names import note
from unigrad_fast.runtime.run_folder import RunFolder
from unigrad_fast.runtime.validation import absolute
from unigrad_fast.runtime.wording import count


@dataclass(frozen=True)
class _Source:
    """Images, and the augmentation to show.

    Attributes:
        name: name of the augmentation, for display.
        views: the views of the epoch.
        cutmix: None without CutMix.
    """

    name: str
    images: Path
    views: tuple[View, ...]
    seed: int
    cutmix: CutMix | None
    photometric: str


def preview(
    path: Path, output: Path, overwrite: bool = False, images: int = 4, epoch: int = 0, **augmentation: Any
) -> None:
    """Write the picture, a row per image: the first ones of an epoch's first batch.

    Args:
        path: a run, a training recipe, or images.
        output: PNG file to write.
        overwrite: replace one that exists.
        images: how many rows; fewer if there are fewer images.
        epoch: epoch of the views.
        augmentation: the other options of `_find_source`.

    Raises:
        UserError: the output's folder cannot be written, the output exists or would be one of the images; a training
            recipe is wrong; or CutMix has no partner.
        OSError: the picture cannot be written.
        DataError: the recipe or the preset does not exist, or an image cannot be used.
    """
    if output.suffix.lower() != ".png":
        raise UserError(f"output = {output}: the preview is a PNG; give a name that ends in .png")
    if not os.path.isdir(output.parent):
        raise UserError(f"output = {output}: the folder {output.parent} does not exist; create it, or give another")
    if os.path.isdir(output):
        raise UserError(f"output = {output}: is a folder; give the name of a file")
    require_folder(output.parent)
    source = _find_source(path, epoch, **augmentation)
    outputs.require_file(output, {"path": source.images})
    views = source.views
    if len(views) == GLOBALS and (local := augmentation.get("local_views")):
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
    heading = [source.name, _summary(views), *mixed, f"seed {source.seed}", f"epoch {epoch}"]
    file = io.BytesIO()
    draw(rows, views, heading).save(file, "PNG", optimize=True)
    outputs.write_files({output: file.getvalue()}, overwrite)
    print(f"views of {count(len(rows), 'image')} under {source.name}, in {output}")


def _find_source(
    path: Path,
    epoch: int,
    recipe: str | None = None,
    preset: str | None = None,
    seed: int | None = None,
    cutmix: bool = False,
    image_size: int | None = None,
    local_crops: int | None = None,
    photometric: str | None = None,
    **changes: Mapping[str, Any],
) -> _Source:
    """Resolves the options of `data preview`.

    Args:
        path: a run, a training recipe, or images.
        recipe: a training recipe; None is that of the path, for images `pretrain`'s default.
        preset: an augmentation preset, in place of a recipe's.
        seed, photometric: None takes those of the path or the recipe.
        cutmix: mix even if the recipe does not.
        image_size, local_crops, changes: as in `pipelines.preset_views`.

    Raises:
        UserError: the recipe is wrong or names no images, or both a recipe and a preset are given.
        DataError: the preset does not exist, or its views are impossible.
    """
    own = _own_recipe(path)
    images, shown = path, None  # provides the seed and the colour operations
    if own is not None:
        shown = resolve(own)
        if shown.data.train is None:
            raise UserError(f"path = {path}: this recipe has no data.train; type `data preview IMAGES --recipe {path}`")
        images = shown.data.train
        if not is_there(images):
            raise UserError(
                f"path = {path}: its images, {images}, do not exist; type `data preview IMAGES --recipe {own}`"
            )
    if recipe in PRESETS and preset in (None, recipe):
        note(f"--recipe {recipe}", f"--preset {recipe}")
        recipe, preset = None, recipe
    if preset is not None:
        if recipe is not None:
            raise UserError(f"preset = {preset}: replaces recipe = {recipe}; leave one of the two out")
        name, views, mixing = preset, preset_views(preset, image_size, local_crops=local_crops, **changes), None
    else:
        chosen = recipe or own or DEFAULT_RECIPE
        if chosen not in recipe_names() and not os.path.isfile(absolute(Path(chosen))):
            raise DataError(
                f"recipe {recipe!r} is unknown; use one of {', '.join(recipe_names())}, the path of a YAML file, or "
                f"--preset with one of {', '.join(PRESETS)}"
            )
        given = {"image_size": image_size, "local_crops": local_crops, **changes}
        shown = resolve(chosen, {"data": {key: value for key, value in given.items() if value not in (None, {})}})
        name, views, growth = f"{_title(chosen)} ({shown.data.preset})", shown.data.views(), shown.data.growth()
        if growth is not None:
            views = growth.views(views, epoch)
        settings = shown.data.cutmix
        mixing = CutMix(settings.probability, settings.alpha) if settings.probability else None
    return _Source(
        name,
        images,
        views,
        seed=seed if seed is not None else shown.seed if shown else 0,
        cutmix=mixing or (CutMix() if cutmix else None),
        photometric=photometric or (shown.data.photometric if shown else "dali"),
    )


def _own_recipe(path: Path) -> str | Path | None:
    """The training recipe at a path, or in the run at a path; None for images."""
    if path.suffix.lower() in (".yaml", ".yml") and os.path.isfile(path):
        return path
    run = RunFolder(path)
    if os.path.isfile(run.configuration) and run.holds_run():
        return run.configuration
    is_name = path.name in recipe_names() and path.parent == Path.cwd()
    return path.name if is_name and not os.path.lexists(path) else None


def _title(recipe: str | Path) -> str:
    path = Path(recipe)
    return path.parent.name if path.name == RunFolder.configuration.name else title(recipe)


def _summary(views: Sequence[View]) -> str:
    sizes = [(number < GLOBALS, view.size) for number, view in enumerate(views)]
    return " + ".join(f"{len(list(same))} × {size} px" for (_, size), same in groupby(sizes))
