"""`unigrad-fast data synth`: draws a labelled set of small JPEG pictures, the data of the quickstart."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

from unigrad_fast.images.drawn_pictures import CLASSES, draw_pictures
from unigrad_fast.runtime.errors import UserError
from unigrad_fast.runtime.files import require_folder

JPEG_QUALITY = 90
PICTURES_AT_ONCE = 50  # the arrays of this many small pictures fit into the cache
DRAWING = 1  # raise when the pictures change, so that a set drawn by an older version is refused
MARKER = ".synthetic.json"  # written last into a finished set: its parameters


def _write(folder: Path, seed: int, parts: dict[str, int], size: int) -> int:
    """Writes the missing files; returns their number."""
    written = 0
    for part_number, (part, per_class) in enumerate(parts.items()):
        for class_number, name in enumerate(CLASSES):
            class_folder = folder / part / name
            class_folder.mkdir(parents=True, exist_ok=True)
            there = set(os.listdir(class_folder))
            missing = [number for number in range(per_class) if f"{number:04}.jpg" not in there]
            if not missing:
                continue
            written += len(missing)
            random = np.random.default_rng([seed, part_number, class_number])
            for start in range(0, per_class, PICTURES_AT_ONCE):
                pictures = draw_pictures(random, name, min(PICTURES_AT_ONCE, per_class - start), size)
                for number in missing:
                    if start <= number < start + len(pictures):
                        picture = Image.fromarray(pictures[number - start])
                        file = class_folder / f"{number:04}.jpg"
                        picture.save(unfinished := file.with_name(f".{file.name}"), quality=JPEG_QUALITY)
                        os.replace(unfinished, file)
    return written


def _finished(folder: Path, parameters: dict[str, int]) -> bool:
    """Whether `folder` holds the set with these parameters; raises UserError if it holds anything else."""
    try:
        if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
            return False
        found = json.loads((folder / MARKER).read_text())
    except (OSError, ValueError):
        found = None
    if found == parameters:
        return True
    what = "another drawn set" if isinstance(found, dict) else "something else"
    raise UserError(f"{folder} holds {what}; name a new folder, or remove this one first")


def draw(
    folder: str | os.PathLike[str],
    seed: int = 0,
    train_per_class: int = 400,
    val_per_class: int = 70,
    size: int = 64,
) -> Path:
    """Draws the set into `folder`, as folder/{train,val}/CLASS/NNNN.jpg, or restores missing files and says so.

    The same arguments give the same bytes (with the same NumPy and Pillow). Images are `size` pixels square; `seed`
    selects the set. The folder appears atomically, with the complete set. Returns the folder.
    Raises UserError for a folder with other content or in a place without permission, or numbers out of range, and
    OSError, which names the folder, if it cannot be written, as on a full disk.
    """
    folder = Path(folder)
    parameters = {
        "drawing": DRAWING,
        "seed": seed,
        "train_per_class": train_per_class,
        "val_per_class": val_per_class,
        "size": size,
    }
    for name, least in (("seed", 0), ("train_per_class", 1), ("val_per_class", 1), ("size", 16)):
        if parameters[name] < least:
            raise UserError(f"{name} {parameters[name]} is too small; use at least {least}")
    parts = {"train": train_per_class, "val": val_per_class}
    try:
        if _finished(folder, parameters):
            if restored := _write(folder, seed, parts, size):
                print(f"{restored:,} images of the set in {folder} were missing and have been drawn again")
            return folder
        require_folder(folder, "folder")
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as temporary:
            drawn = Path(temporary) / "set"  # a subfolder, because other users cannot read the temporary one
            _write(drawn, seed, parts, size)
            (drawn / MARKER).write_text(json.dumps(parameters))
            if not _finished(folder, parameters):  # unless another process was faster
                drawn.replace(folder)
    except OSError as error:
        error.filename, error.filename2 = os.fspath(folder), None
        raise
    return folder
