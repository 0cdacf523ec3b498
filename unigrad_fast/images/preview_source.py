"""The images and the augmentation of a preview: from a run, a training recipe, or the options."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unigrad_fast.config import Config, resolve
from unigrad_fast.pipelines import PRESETS, CutMix, View
from unigrad_fast.pipelines.presets import preset_views
from unigrad_fast.recipes import DEFAULT_RECIPE, recipe_names
from unigrad_fast.runtime.errors import DataError, UserError
from unigrad_fast.runtime.older_names import note
from unigrad_fast.runtime.run_folder import RunFolder
from unigrad_fast.runtime.validation import absolute

ENDINGS = (".yaml", ".yml")


@dataclass(frozen=True)
class PreviewSource:
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


def find_source(
    path: Path,
    recipe: str | None,
    preset: str | None,
    seed: int | None,
    epoch: int,
    cutmix: bool,
    image_size: int | None,
    local_crops: int | None,
    photometric: str | None,
    changes: Mapping[str, Mapping[str, Any]],
) -> PreviewSource:
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
        if not os.path.exists(images):
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
        name, views, mixing = f"{_title(chosen)} ({shown.data.preset})", _views(shown, epoch), _mixing(shown)
    return PreviewSource(
        name,
        images,
        views,
        seed=seed if seed is not None else shown.seed if shown else 0,
        cutmix=mixing or (CutMix() if cutmix else None),
        photometric=photometric or (shown.data.photometric if shown else "dali"),
    )


def _own_recipe(path: Path) -> str | Path | None:
    """The training recipe at a path, or in the run at a path; None for images."""
    if _is_file(path):
        return path
    run = RunFolder(path)
    if os.path.isfile(run.configuration) and run.holds_run():
        return run.configuration
    is_name = path.name in recipe_names() and path.parent == Path.cwd()
    return path.name if is_name and not os.path.lexists(path) else None


def _is_file(path: Path) -> bool:
    return path.suffix.lower() in ENDINGS and os.path.isfile(path)


def _title(recipe: str | Path) -> str:
    path = Path(recipe)
    return path.parent.name if path.name == RunFolder.configuration.name else path.stem


def _views(config: Config, epoch: int) -> tuple[View, ...]:
    views, growth = config.data.views(), config.data.growth()
    return views if growth is None else growth.views(views, epoch)


def _mixing(config: Config) -> CutMix | None:
    settings = config.data.cutmix
    return CutMix(settings.probability, settings.alpha) if settings.probability else None
