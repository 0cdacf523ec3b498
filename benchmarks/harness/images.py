"""Images for a benchmark: the user's or drawn ones, as files, linked repeatedly if there are too few."""

from __future__ import annotations

import io
import shutil
import tarfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image

from unigrad_fast.images import drawing
from unigrad_fast.pipelines import Manifest
from unigrad_fast.pipelines.files.headers import EXTENSIONS
from unigrad_fast.runtime.errors import DataError

DRAWN_PER_CLASS, DRAWN_SIZE = 5, 400  # images, and pixels per side, about as in ImageNet
ENTRIES = 2048  # files at most that are used of a source


def source(given: Path | None, folder: Path) -> tuple[Path, str]:
    """The given images, or a folder in `folder` with drawn ones, and a description."""
    if given is not None:
        return given, f"images of {given.name}"
    drawn = drawing.draw(folder / "drawn", 0, DRAWN_PER_CLASS, 1, DRAWN_SIZE)
    return drawn / "train", f"drawn images of {DRAWN_SIZE} pixels"


def find_images(given: Path | None, folder: Path) -> tuple[list[Path], str]:
    """Up to ENTRIES image files, and a description of them; images from archives are written into `folder`.

    Args:
        given: anything that `Manifest.open` takes, or a tar with images in folders; None draws images.
        folder: a folder to make.

    Raises:
        DataError: no image can be decoded.
    """
    folder.mkdir()
    images, what = source(given, folder)
    if images.is_file() and tarfile.is_tarfile(images):
        paths = extract(images, folder)
    else:
        paths = choose(Manifest.open(images, folder), folder)
    with ThreadPoolExecutor() as pool:
        usable = [path for path, decodes in zip(paths, pool.map(is_decodable, paths), strict=True) if decodes]
    if not usable:
        raise DataError(f"images = {given}: none of {len(paths)} images can be decoded; give a folder of images")
    if len(usable) < len(paths):
        what += f" ({len(paths) - len(usable)} ignored because they cannot be decoded)"
    return usable, f"{len(usable):,} {what}"


def extract(archive: Path, folder: Path) -> list[Path]:
    """Write the first ENTRIES images of a tar, at any depth, into a folder."""
    paths: list[Path] = []
    with tarfile.open(archive) as tar:
        for member in tar:
            if len(paths) == ENTRIES:
                break
            if member.isfile() and member.name.lower().endswith(EXTENSIONS):
                paths.append(folder / f"{len(paths):06}{Path(member.name).suffix}")
                with paths[-1].open("wb") as file:
                    shutil.copyfileobj(tar.extractfile(member), file)
    return paths


def choose(found: Manifest, folder: Path) -> list[Path]:
    """Up to ENTRIES images of a manifest, spread evenly; those inside archives are written into a folder."""
    positions = np.setdiff1d(np.arange(len(found)), found.unreadable())
    paths = []
    for index in positions[:: -(-len(positions) // ENTRIES)].tolist():
        paths.append(Path(found.path(index)))
        if not paths[-1].is_file():
            paths[-1] = folder / f"{index:09}{paths[-1].suffix}"
            paths[-1].write_bytes(found.read(index))
    return paths


def is_decodable(path: Path) -> bool:
    """Whether Pillow can decode a file; afterwards the file is in the page cache."""
    try:
        read_image(path.read_bytes())
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
        return False
    return True


def read_image(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data)).convert("RGB")


def spread_evenly(available: int, count: int) -> list[int]:
    """`count` numbers below `available`: a subset spread evenly, or, if `count` is larger, all of them cyclically."""
    return [number * available // count if count < available else number % available for number in range(count)]


def link_images(paths: Iterable[Path], folder: Path) -> Path:
    """A new flat folder of links to images, in the given order."""
    folder.mkdir(parents=True)
    for number, path in enumerate(paths):
        (folder / f"{number:06}{path.suffix}").symlink_to(path)
    return folder
