"""Result files in RUN/evaluation or a given folder: one per protocol, epoch and settings; none replaces another.

knn-epoch100.json                              knn-epoch100-2.json: the same epoch with another k, for instance
linear-paper-epoch100.json, .safetensors       the result, and the classifier
finetune-swav-0.1-epoch100.json, .safetensors  the result, and the fine-tuned network
map-pca-epoch100.json, .png                    what a picture shows, and the picture
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

import unigrad_fast
from unigrad_fast.runtime.errors import RunStopped, UserError
from unigrad_fast.runtime.file_errors import STORAGE, WRITING, remedy
from unigrad_fast.runtime.files import unwritable, write_whole
from unigrad_fast.runtime.outputs import Written, require_file, within_images
from unigrad_fast.runtime.run_folder import RunFolder
from unigrad_fast.runtime.validation import shown


def folder_of(run: Path | None, output: Path | None = None) -> Path:
    """The folder of the results: `output`, or RUN/evaluation; without a run `output` is given.

    Raises UserError if it cannot be written.
    """
    folder = output if run is None else RunFolder(run).evaluation
    if output is not None and (run is None or os.path.realpath(output) != os.path.realpath(folder)):
        folder = output
        require_file(folder / "results.json")
    elif os.path.lexists(folder) and not os.path.isdir(folder):
        raise UserError(
            f"{folder}: is not a folder, but results are written there; move it away, or give another folder with "
            "--output"
        )
    if problem := unwritable(folder):
        raise UserError(f"results go to {folder}, but {problem} with --output")
    return folder


def folder_beside(run: Path | None, output: Path | None, images: Mapping[str, Path | None]) -> Path:
    """As `folder_of`, for pictures, which must not come among images: folders by the keys that named them."""
    folder = folder_of(run, output)
    if problem := within_images(folder / "picture.png", images):
        raise UserError(f"output = {folder}: {problem}")
    return folder


def write_result(
    folder: Path,
    stem: str,
    settings: Mapping[str, Any],
    figures: Mapping[str, Any],
    weights: Mapping[str, Tensor] | None = None,
    about_weights: Mapping[str, Any] | None = None,
    picture: bytes | None = None,
) -> Written:
    """Write a result to STEM.json, or STEM-2.json, ...: the first that is free or has the same settings.

    If it has, figures from an earlier call that this one lacks are kept. The versions of the software are added.

    Args:
        settings: JSON values for which the result is valid.
        figures: JSON values, the result itself.
        weights: tensors for STEM.safetensors, contiguous.
        about_weights: further JSON values for that file, in place of those of the same name.
        picture: content of STEM.png.

    Returns:
        The result, whose line says which figures the file keeps, and names a file with other settings.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settings, figures = json.loads(json.dumps([settings, {**figures, "versions": versions()}]))  # as they will be read
    with _locked(folder):
        passed: list[tuple[Path, Any]] = []
        for number in count(1):
            path = folder / (f"{stem}.json" if number == 1 else f"{stem}-{number}.json")
            saved, drawn = path.with_suffix(".safetensors"), path.with_suffix(".png")
            if not any(map(os.path.lexists, (path, saved, drawn))):
                before = {}
                break
            before = _read(path)
            if before is not None and all(before.get(key) == value for key, value in settings.items()):
                break
            passed.append((path, before))
        kept = []
        for key, value in figures.items():
            earlier = before.get(key)
            if isinstance(value, dict) and isinstance(earlier, dict):
                kept += [name for name in earlier if name not in value]
                figures[key] = {**earlier, **value}
        # First the figures, whatever there is room for; without them a repeated command would not take these names.
        write_whole(path, json.dumps({**settings, **figures}, indent=2).encode() + b"\n")
        line = f"written to {path}"
        if weights is not None:
            about = {**settings, **figures, **(about_weights or {})}
            texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in about.items()}
            content = save({key: value.detach().cpu() for key, value in weights.items()}, texts)
            write_whole(saved, content)
            line += f", weights in {saved.name} ({len(content) / 1e6:.1f} MB)"
        if picture is not None:
            write_whole(drawn, picture)
            line += f", drawn in {drawn.name}"
    if kept:
        line += f", which keeps {', '.join(dict.fromkeys(kept))} from an earlier call"
    if passed:
        other, content = passed[0]
        key = next((key for key in settings if isinstance(content, dict) and content.get(key) != settings[key]), None)
        reason = f"has {key} = {shown(content.get(key))} and " if key else ""
        line += f"; {other.name} {reason}was kept"
    return Written(path, settings, figures, line, None if picture is None else drawn)


@contextmanager
def printed(kept: str = "") -> Iterator[None]:
    """For the writing of a result that was printed: an error of the file system says so, and what else is `kept`.

    Raises RunStopped with that text.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (*WRITING, *STORAGE):
            raise
        raise RunStopped(
            f"{error.filename} cannot be written: {error.strerror}; {remedy(error)}, then repeat the command. Its "
            f"result is printed above{kept and f', and {kept}'}"
        ) from None


def versions() -> dict[str, str]:
    """The versions of what computes a result."""
    from nvidia import dali

    return {"unigrad_fast": unigrad_fast.__version__, "torch": str(torch.__version__), "dali": dali.__version__}


def read_results(folder: Path) -> dict[str, dict[str, Any]]:
    """The results in a folder, or in that of a run, by the names of their files without the ending."""
    paths = [*sorted(folder.glob("*.json")), *sorted(RunFolder(folder).evaluation.glob("*.json"))]
    found = {path.stem: content for path in paths if (content := _read(path)) is not None}
    return {name: content for name, content in found.items() if {"protocol", "accuracy"} <= content.keys()}


def _read(path: Path) -> dict[str, Any] | None:
    """A result; None if there is none, or it cannot be read."""
    with suppress(OSError, ValueError, RecursionError):
        content = json.loads(path.read_text(encoding="utf-8"))
        return content if isinstance(content, dict) else None
    return None


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Holds a lock on the folder; does nothing on a file system without locks."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
