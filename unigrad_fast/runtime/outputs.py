"""Where commands may write. The rule: files that we did not write are never replaced.

A file is written under a free name, or over one with the same content; anything else needs `--overwrite true`. A run
is written to a new folder, to its own folder, or to one without files that a run would replace. No other command
replaces files of a run, nothing is written among the images or through a dangling link, and no new run around images.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unigrad_fast.pipelines.spelling import location
from unigrad_fast.runtime.errors import UserError
from unigrad_fast.runtime.files import dangling_link, write_whole
from unigrad_fast.runtime.run_folder import RunFolder
from unigrad_fast.runtime.validation import Node

JUDGED = "trained encoder"  # among the figures that one result compares


@dataclass(frozen=True)
class Written:
    """A result in its file.

    Attributes:
        path: the file.
        settings: JSON values for which the result is valid.
        figures: JSON values, the result itself.
        line: says to the user what was written.
        picture: its picture; None if it has none.
    """

    path: Path
    settings: Mapping[str, Any]
    figures: Mapping[str, Any]
    line: str = ""
    picture: Path | None = None


def judged(figure: Any) -> Any:
    """The figure of the trained encoder, if there are those of others, too."""
    return figure.get(JUDGED) if isinstance(figure, Mapping) else figure


def require_file(path: Path, images: Mapping[str, Path | None] | None = None, run: Path | None = None) -> None:
    """Raises UserError if a file must not be written to a path, as far as that is known without its content.

    Args:
        path: path of the file.
        images: folders of images by the keys that named them, for a command that writes pictures.
        run: a folder that is known to hold a run.
    """
    problem = dangling_link(path) or within_images(path, images or {})
    if problem is None and (owner := _owner(path, run)):
        problem = f"is inside the run in {owner}; give a file elsewhere, or in {owner.exports}"
    if problem:
        raise UserError(f"output = {path}: {problem}")


def write_files(contents: Mapping[Path, bytes], overwrite: bool) -> None:
    """Write all files, or none if one exists with other content and must not be replaced.

    Raises:
        UserError: such a file exists.
    """
    wanted = {path: content for path, content in contents.items() if not _holds(path, content)}
    require_free(wanted, overwrite)
    for path, content in wanted.items():
        write_whole(path, content)


def require_free(paths: Iterable[Path], overwrite: bool) -> None:
    """Raises UserError if there is a file that must not be replaced."""
    for path in paths:
        if os.path.lexists(path) and not overwrite:
            raise UserError(f"output = {path}: already exists; give another name, or --overwrite true")


def within_images(path: Path, images: Mapping[str, Path | None]) -> str | None:
    """Why pictures cannot be written to a path: it is inside a folder of images. None if it is not."""
    real = Path(os.path.realpath(path))
    for key, folder in _folders(images):
        if real.is_relative_to(os.path.realpath(folder)):
            return f"lies in {key} = {folder}, where the output would be read as images; give another place"
    return None


def around_images(path: Path, images: Mapping[str, Path | None]) -> str | None:
    """Why a new run cannot be written to a path: a folder of images is inside it. None if there is none."""
    real = os.path.realpath(path)
    for key, folder in _folders(images):
        if Path(os.path.realpath(folder)).is_relative_to(real):
            return (
                f"{key} = {folder} lies in it, but a folder that holds a run cannot be opened as images; "
                f"give another folder, such as {path / 'run'}"
            )
    return None


def _folders(images: Mapping[str, Path | None]) -> Iterator[tuple[str, Path]]:
    """The folders among sources of images, with the keys that named them."""
    for key, source in images.items():
        folder = None if source is None else location(source)
        if folder is not None and os.path.isdir(folder):
            yield key, folder


def require_whole_links(options: Node, prefix: str = "") -> None:
    """Raises UserError if an option is a path through a dangling link."""
    for key, value in options:
        if isinstance(value, Node):
            require_whole_links(value, f"{prefix}{key}.")
        elif isinstance(value, Path) and (problem := dangling_link(value)):
            raise UserError(f"{prefix}{key} = {value}: {problem}")


def _owner(path: Path, run: Path | None) -> RunFolder | None:
    """The run whose folder would contain a file; None if there is none, or if the file is among the run's exports."""
    real = Path(os.path.realpath(path))
    known = run and Path(os.path.realpath(run))
    for folder in map(RunFolder, real.parents):
        if folder.path == known or folder.holds_run():
            return None if folder.exports in real.parents else folder
    return None


def _holds(path: Path, content: bytes) -> bool:
    return os.path.isfile(path) and os.path.getsize(path) == len(content) and path.read_bytes() == content
