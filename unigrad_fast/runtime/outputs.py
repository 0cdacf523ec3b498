"""Where commands may write. The rule: what we did not write is never replaced.

A file goes to a free name, or to one that holds the same already; any other needs `--overwrite true`. A run goes to a
new folder, to one that holds it, or to one with nothing in it that a run would replace. Nothing else replaces what a
run consists of, and nothing goes to the images or through a link that leads nowhere.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from unigrad_fast.runtime.errors import UserError
from unigrad_fast.runtime.links import dangling_link
from unigrad_fast.runtime.run_folder import RunFolder
from unigrad_fast.runtime.validation import Node
from unigrad_fast.runtime.whole_file import write_whole


def require_file(path: Path, images: Mapping[str, Path | None] | None = None, run: Path | None = None) -> None:
    """Raises UserError where no file may be written, as far as that is known without its content.

    Args:
        path: of the file.
        images: folders of images by the keys that gave them, for a command that writes pictures.
        run: a folder that holds a run in any case.
    """
    problem = dangling_link(path) or within_images(path, images or {})
    if problem is None and (owner := _owner(path, run)):
        problem = f"belongs to the run in {owner}; give a file elsewhere, or in {owner.exports}"
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


def _owner(path: Path, run: Path | None) -> RunFolder | None:
    """The run that a file would belong to; None where that is none, or where it is in the run's folder of exports."""
    real = Path(os.path.realpath(path))
    known = run and Path(os.path.realpath(run))
    for folder in map(RunFolder, real.parents):
        if folder.path == known or folder.holds_run():
            return None if folder.exports in real.parents else folder
    return None


def _holds(path: Path, content: bytes) -> bool:
    return os.path.isfile(path) and os.path.getsize(path) == len(content) and path.read_bytes() == content
