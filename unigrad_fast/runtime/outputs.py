"""Where commands may write. The rule: what we did not write is never replaced.

A file goes to a free name, or to one that holds the same already; any other needs `--overwrite true`. A run goes to a
new folder, to one that holds it, or to one with nothing in it that a run would replace. Nothing else replaces what a
run consists of, and nothing goes to the images or through a link that leads nowhere.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path

import yaml

from unigrad_fast.runtime.errors import UserError
from unigrad_fast.runtime.links import dangling_link
from unigrad_fast.runtime.validation import Node
from unigrad_fast.runtime.whole_file import write_whole

EXPORTS = "export"  # the one folder in a run's that other commands may write to
FOLDERS_OF_A_RUN = ("checkpoints", "tensorboard", "evaluation")
EVALUATIONS = ("evaluation", "knn.json", "linear.json", "linear.safetensors")  # of a run's checkpoints
FILES_OF_A_RUN = (
    *("config.yaml", "metrics.jsonl", "log.txt", "summary.json", "curves.png", "curves.svg", "bad_images.jsonl"),
    *EVALUATIONS,
)
CHECKPOINTS = "checkpoints/step-*/checkpoint.json"
KEYS_OF_A_RUN = ("seed", "output", "recipe", "data", "model", "objective", "target", "optimizer", "schedule")
LARGEST_CONFIGURATION = 1 << 20  # bytes; a run's has some thousand


def require_file(path: Path, images: Mapping[str, Path | None] | None = None, run: Path | None = None) -> None:
    """Raises UserError where no file may be written, as far as that is known without its content.

    Args:
        path: of the file.
        images: folders of images by the keys that gave them, for a command that writes pictures.
        run: a folder that holds a run in any case.
    """
    problem = dangling_link(path) or within_images(path, images or {})
    if problem is None and (owner := _owner(path, run)):
        problem = f"belongs to the run in {owner}; give a file elsewhere, or in {owner / EXPORTS}"
    if problem:
        raise UserError(f"output = {path}: {problem}")


def write_files(contents: Mapping[Path, bytes], overwrite: bool) -> None:
    """Write files, or none of them where one of another content exists and may not be replaced.

    Raises:
        UserError: one exists.
    """
    wanted = {path: content for path, content in contents.items() if not _holds(path, content)}
    for path in wanted:
        if os.path.lexists(path) and not overwrite:
            raise UserError(f"output = {path}: exists already; give another name, or --overwrite true")
    for path, content in wanted.items():
        write_whole(path, content)


def problem_of_run_folder(folder: Path) -> str | None:
    """Why a run cannot be written to a folder, or go on there; None when it can."""
    if problem := dangling_link(folder):
        return problem
    if not os.path.exists(folder):
        return None
    if not os.path.isdir(folder):
        return "is a file; give a folder"
    try:
        ours = sorted(filter(_is_of_a_run, os.listdir(folder)))
    except OSError as error:
        return f"cannot be listed ({error.strerror}); check its permissions, or give another folder"
    if ours and not holds_run(folder):
        return f"this is not a run, and a run would replace {', '.join(ours)}; give another folder, or move them away"
    for name in ours:
        if problem := dangling_link(folder / name):
            return problem
        if (name in FOLDERS_OF_A_RUN) != os.path.isdir(folder / name):
            found, wanted = ("file", "folder") if name in FOLDERS_OF_A_RUN else ("folder", "file")
            return f"{name} is a {found}, where a run keeps a {wanted}; move it away, or give another folder"
    judged = [name for name in ours if _matches(name, EVALUATIONS)]
    if judged and not any(folder.glob(CHECKPOINTS)):
        return f"{', '.join(judged)} belongs to deleted checkpoints; move it away, or give another folder"
    return None


def holds_run(folder: Path) -> bool:
    """Whether a folder holds a run: the configuration that every run begins with, or a checkpoint."""
    return _is_configuration(folder / "config.yaml") or any(folder.glob(CHECKPOINTS))


def within_images(path: Path, images: Mapping[str, Path | None]) -> str | None:
    """Why pictures cannot be written to a path: it lies in a folder of images. None when it does not."""
    real = Path(os.path.realpath(path))
    for key, folder in images.items():
        if folder is not None and os.path.isdir(folder) and real.is_relative_to(os.path.realpath(folder)):
            return f"lies in {key} = {folder}, and what is written there would become images; give another place"
    return None


def require_whole_links(options: Node, prefix: str = "") -> None:
    """Raises UserError where an option is a path through a link that leads nowhere."""
    for key, value in options:
        if isinstance(value, Node):
            require_whole_links(value, f"{prefix}{key}.")
        elif isinstance(value, Path) and (problem := dangling_link(value)):
            raise UserError(f"{prefix}{key} = {value}: {problem}")


def _owner(path: Path, run: Path | None) -> Path | None:
    """The run that a file would belong to; None where that is none, or where it is in the run's folder of exports."""
    real = Path(os.path.realpath(path))
    known = run and Path(os.path.realpath(run))
    for folder in real.parents:
        if folder == known or holds_run(folder):
            return None if (folder / EXPORTS) in real.parents else folder
    return None


def _is_of_a_run(name: str) -> bool:
    return name in FOLDERS_OF_A_RUN or _matches(name, FILES_OF_A_RUN)


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _is_configuration(path: Path) -> bool:
    """Whether a file is the whole tree with the run's folder in it, as a run writes it."""
    try:
        with open(path, "rb") as file:
            tree = yaml.safe_load(file.read(LARGEST_CONFIGURATION).decode())
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return False
    return isinstance(tree, dict) and all(key in tree for key in KEYS_OF_A_RUN) and isinstance(tree["output"], str)


def _holds(path: Path, content: bytes) -> bool:
    return os.path.isfile(path) and os.path.getsize(path) == len(content) and path.read_bytes() == content
