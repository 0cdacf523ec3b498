"""Checks what a command needs before it starts: a run, usable folders, optional libraries."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Collection
from pathlib import Path

from unigrad_fast.config import Config, Data, resolve
from unigrad_fast.pipelines.spelling import location
from unigrad_fast.runtime.errors import UserError
from unigrad_fast.runtime.files import dangling_link, unwritable
from unigrad_fast.runtime.outputs import around_images, within_images
from unigrad_fast.runtime.run_folder import RunFolder
from unigrad_fast.runtime.validation import Node, shown


def require_run(folder: Path) -> None:
    """Raises UserError unless a folder holds a run."""
    if not os.path.exists(RunFolder(folder).configuration) and not RunFolder(folder).holds_run():
        raise UserError(
            f"run = {folder}: no run there (no config.yaml, no checkpoint); give a folder that `pretrain` wrote"
        )


def require_given_file(key: str, path: Path) -> None:
    """Raises UserError unless the file that a key names is there."""
    if not os.path.isfile(path):
        problem = "is a folder; give a file in it" if os.path.isdir(path) else "no such file; check the path"
        raise UserError(f"{key} = {path}: {problem}")


def require_name(name: str) -> None:
    """Raises UserError unless files and folders can be called so."""
    if "/" in name or name in (".", ".."):
        raise UserError(f"name = {name}: is not the name of a folder; give one, or a path with --output")


def require_folders(config: Config, fresh: bool = False, numbered: bool = False) -> None:
    """Raises UserError unless the images can be opened and the output folder can be used.

    Args:
        fresh: the output folder must not hold a run, which would otherwise be continued.
        numbered: if the folder exists, the run takes another one with a number.
    """
    # os.path returns False where pathlib raises: for folders without permission, and names that are too long.
    problems = []
    for key, folder in (("data.train", config.data.train), ("data.val", config.data.val)):
        place = None if folder is None else location(folder)
        if folder is None or place is None:
            continue
        if not os.path.exists(place):
            problem = dangling_link(place) or f"no such file or folder; {_remedy(place, config.data)}"
            problems.append(f"{key} = {folder}: {problem}")
        elif not os.access(place, os.R_OK | (os.X_OK if os.path.isdir(place) else 0)):
            problems.append(f"{key} = {folder}: unreadable; check its permissions")
    if config.data.train is None:
        problems.append("data.train = null: no training images; give their folder with --data.train FOLDER")
    if config.output is not None:
        problems += _output_problems(config, fresh, numbered)
    if problems:
        raise UserError("\n".join(problems))


def _remedy(missing: Path, data: Data) -> str:
    """What to do about training or validation images that are not there."""
    drawn = resolve("quickstart").data
    if data.train == drawn.train and missing in (drawn.train, drawn.val):
        return "draw the built-in images with `unigrad-fast data synth data/quickstart`"
    there = next(folder for folder in missing.parents if os.path.exists(folder))
    remedy = f"check the path, of which {there} exists"
    if data.val is None or missing != location(data.val):
        return remedy
    if missing == drawn.val:  # the recipe's, which are not of the training images
        remedy = "give your validation images with --data.val IMAGES"
    return f"{remedy}, or train without evaluation with --data.val null"


def _output_problems(config: Config, fresh: bool, numbered: bool) -> list[str]:
    output = config.output
    if fresh and not numbered and RunFolder(output).holds_run():
        return [f"output = {output}: already contains a run; --fresh needs an empty folder"]
    images = {"data.train": config.data.train, "data.val": config.data.val}
    problem = within_images(output, images)
    if not numbered and not RunFolder(output).holds_run():
        problem = problem or around_images(output, images)
    if problem := problem or (dangling_link(output.parent) if numbered else RunFolder(output).problem()):
        return [f"output = {output}: {problem}"]
    problem = unwritable(output.parent if numbered else output)
    return [f"output = {output}: {problem}"] if problem else []


def refuse_unused(options: Node, keys: Collection[str], why: str) -> None:
    """Raises UserError where one of these options is given, which are not used, and why."""
    if given := sorted(options.model_fields_set & set(keys)):
        raise UserError(f"{given[0]} = {shown(getattr(options, given[0]))}: {why}; leave it out")


def require_dali() -> None:
    """Raises UserError if DALI, whose package depends on the CUDA version, is not installed."""
    if importlib.util.find_spec("nvidia") is None or importlib.util.find_spec("nvidia.dali") is None:
        raise UserError(
            "DALI, which decodes the images, is not installed; type `pip install nvidia-dali-cuda130`, or "
            "`nvidia-dali-cuda120` for a torch with CUDA 12 (without a GPU, either works)"
        )


def require_triton() -> None:
    """Raises UserError if Triton, which torch installs only on Linux, is not installed."""
    if importlib.util.find_spec("triton") is None:
        raise UserError("Triton, which compiles the kernels, is not installed; type `pip install triton`")


def require_umap() -> None:
    """Raises UserError if umap-learn, an extra, is not installed."""
    if importlib.util.find_spec("umap") is None:
        raise UserError(
            "method = umap: needs umap-learn, which is not installed; type `pip install 'unigrad-fast[umap]'`, or take "
            "--method pca"
        )
