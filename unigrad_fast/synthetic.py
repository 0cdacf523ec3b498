"""A labelled set of small JPEG pictures, drawn: the data of the quickstart.

A class is a shape filled with a pattern. Each picture shows several such objects; their colours, positions, sizes,
directions and shading differ inside one picture as much as between pictures, and so do the light, the background and
its clutter. What all crops of a picture share is the class and little else: pixels and colours say next to nothing
about it, and an encoder that learns what crops have in common finds it.

All arithmetic runs over a batch of pictures at once, in float32, in coordinates from −1 to 1 over the picture.
Shape suffixes: N pictures, H and W pixels.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.random import Generator
from PIL import Image

from unigrad_fast.errors import UserError

Array = np.ndarray
Plane = Callable[[Array, Array], Array]

TAU = 2 * np.pi
JPEG_QUALITY = 90
MARKER = ".synthetic.json"
DRAWING = 1  # raise when pictures change, so that a set of older pictures is not taken for the new ones
PICTURES_AT_ONCE = 50


# Shapes: distance to the outline, negative inside; about 1 from the centre to the farthest point.


def _disc(x: Array, y: Array) -> Array:
    return np.hypot(x, y) - 0.85


def _square(x: Array, y: Array) -> Array:
    return np.maximum(np.abs(x), np.abs(y)) - 0.75


def _triangle(x: Array, y: Array) -> Array:
    return np.maximum(-y, 0.866 * np.abs(x) + 0.5 * y) - 0.5


def _star(x: Array, y: Array) -> Array:
    sector = TAU / 5
    angle = np.abs(np.mod(np.arctan2(y, x) + sector / 2, sector) - sector / 2)
    radius = np.hypot(x, y)
    tip, notch_x, notch_y = 1.05, 0.45 * np.cos(sector / 2), 0.45 * np.sin(sector / 2)
    normal_x, normal_y = notch_y, tip - notch_x
    inside = normal_x * (radius * np.cos(angle) - tip) + normal_y * radius * np.sin(angle)
    return inside / np.hypot(normal_x, normal_y)


def _cross(x: Array, y: Array) -> Array:
    x, y = np.abs(x), np.abs(y)
    return np.minimum(np.maximum(x - 0.95, y - 0.36), np.maximum(y - 0.95, x - 0.36))


def _ring(x: Array, y: Array) -> Array:
    return np.abs(np.hypot(x, y) - 0.66) - 0.29


# Patterns: share of the second colour, from 0 to 1, with a period of about 1.


def _edge(wave: Array) -> Array:
    return 0.5 + 0.5 * np.tanh(2.5 * wave)


def _stripes(u: Array, v: Array) -> Array:
    return _edge(np.sin(TAU * u))


def _checks(u: Array, v: Array) -> Array:
    return _edge(2 * np.sin(TAU * 0.7 * u) * np.sin(TAU * 0.7 * v))


def _dots(u: Array, v: Array) -> Array:
    return _edge(3 * (np.cos(TAU * 0.8 * u) + np.cos(TAU * 0.8 * v) - 0.7))


def _zigzag(u: Array, v: Array) -> Array:
    return _edge(np.sin(TAU * (u + 0.5 * np.abs(np.mod(0.8 * v, 1) * 2 - 1))))


def _grid(u: Array, v: Array) -> Array:
    return _edge(3 * (np.maximum(np.cos(TAU * 0.8 * u), np.cos(TAU * 0.8 * v)) - 0.75))


def _plain(u: Array, v: Array) -> Array:
    return np.zeros_like(u)


CLASSES: dict[str, tuple[Plane, Plane]] = {
    "checked-star": (_star, _checks),
    "checked-triangle": (_triangle, _checks),
    "dotted-disc": (_disc, _dots),
    "dotted-square": (_square, _dots),
    "grid-cross": (_cross, _grid),
    "grid-disc": (_disc, _grid),
    "plain-ring": (_ring, _plain),
    "plain-star": (_star, _plain),
    "striped-disc": (_disc, _stripes),
    "striped-triangle": (_triangle, _stripes),
    "zigzag-cross": (_cross, _zigzag),
    "zigzag-square": (_square, _zigzag),
}


def _turned(x: Array, y: Array, angle_N: Array) -> tuple[Array, Array]:
    cosine, sine = (f(angle_N)[:, None, None] for f in (np.cos, np.sin))
    return cosine * x + sine * y, cosine * y - sine * x


class _Canvas:
    """N pictures in the making, and the random numbers for them.

    Attributes:
        pixels: [N, H, W, 3], about 0 to 1.
        x, y: [N, H, W] coordinates of the pixels.
    """

    def __init__(self, random: Generator, pictures: int, size: int):
        self.random, self.pictures, self.size = random, pictures, size
        axis = (np.arange(size, dtype=np.float32) + 0.5) / size * 2 - 1
        self.x = np.broadcast_to(axis[None, None, :], (pictures, size, size))
        self.y = np.broadcast_to(axis[None, :, None], (pictures, size, size))
        # Background: random colours at 3×3 points, and what lies between them.
        knots = 0.5 + self.uniform(-0.2, 0.2, 3, 3, 3)
        weights = np.clip(1 - np.abs(axis[:, None] - np.array([-1, 0, 1], np.float32)), 0, 1)
        self.pixels = np.einsum("nabc,ya,xb->nyxc", knots, weights, weights, optimize=True)

    def uniform(self, low: float, high: float, *shape: int) -> Array:
        return self.random.uniform(low, high, (self.pictures, *shape)).astype(np.float32)

    def paint(self, colour: Array, distance: Array, opacity_N: Array) -> None:
        """Lay a colour (broadcast to [N, H, W, 3]) over where the distance (in coordinates) is negative."""
        cover = np.clip(0.5 - distance * (self.size / 2), 0, 1) * opacity_N[:, None, None]
        self.pixels += (colour - self.pixels) * cover[..., None]

    def clutter(self) -> None:
        """A bar of one colour."""
        u, v = _turned(
            self.x - self.uniform(-1, 1, 1, 1), self.y - self.uniform(-1, 1, 1, 1), self.uniform(0, TAU)
        )
        length, breadth = self.uniform(0.05, 0.45, 1, 1), self.uniform(0.03, 0.15, 1, 1)
        distance = np.maximum(np.abs(u) - length, np.abs(v) - breadth)
        self.paint(self.uniform(0.25, 0.75, 1, 1, 3), distance, self.uniform(0.3, 0.9))

    def object(self, shape: Plane, pattern: Plane, shown_N: Array) -> None:
        """One object: place, size, direction, colours, pattern's direction and phase, shading are its own."""
        scale = self.uniform(*OBJECT_SCALE, 1, 1)
        x, y = self.x - self.uniform(-0.85, 0.85, 1, 1), self.y - self.uniform(-0.85, 0.85, 1, 1)
        stretch = np.exp(self.uniform(-0.15, 0.15, 1, 1))
        u, v = _turned(x, y, self.uniform(0, TAU))
        u, v = u / (scale * stretch), v * stretch / scale
        distance = shape(u, v) * scale

        period = self.uniform(*PATTERN_PERIOD, 1, 1)
        a, b = _turned(x, y, self.uniform(0, TAU))
        share = pattern(a / period + self.uniform(0, 1, 1, 1), b / period + self.uniform(0, 1, 1, 1))[..., None]
        # Two colours, one lighter and one darker than the middle, in either order.
        side = np.where(self.uniform(0, 1, 1) < 0.5, -0.6, 0.6) + self.uniform(-1, 1, 3)
        side *= self.uniform(0.28, 0.45, 1) / np.abs(side).max(axis=1, keepdims=True)
        middle = 0.5 + self.uniform(-0.08, 0.08, 3)
        first, second = ((middle + sign * side)[:, None, None, :] for sign in (1, -1))
        shade, _ = _turned(u, v, self.uniform(0, TAU))
        light = 1 + self.uniform(0, 0.3, 1, 1) * shade
        self.paint((first + (second - first) * share) * light[..., None], distance, shown_N)

    def finish(self) -> Array:
        """Light from one side, and noise; uint8 [N, H, W, 3]."""
        slope, _ = _turned(self.x, self.y, self.uniform(0, TAU))
        pixels = self.pixels * (1 + self.uniform(0, 0.4, 1, 1) * slope)[..., None]
        pixels += 0.02 * self.random.standard_normal(pixels.shape, dtype=np.float32)
        return (np.clip(pixels, 0, 1) * 255 + 0.5).astype(np.uint8)


OBJECTS = (3, 6)  # in a picture
OBJECT_SCALE = (0.3, 0.6)  # from the centre to the outline; the picture is 2 wide
PATTERN_PERIOD = (0.2, 0.3)
CLUTTER = 3  # bars in a picture


def pictures(random: Generator, name: str, count: int, size: int) -> Array:
    """`count` pictures of a class, uint8 [N, H, W, 3] with H = W = size."""
    shape, pattern = CLASSES[name]
    canvas = _Canvas(random, count, size)
    for _ in range(CLUTTER):
        canvas.clutter()
    objects_N = random.integers(OBJECTS[0], OBJECTS[1] + 1, count)
    for number in range(OBJECTS[1]):
        canvas.object(shape, pattern, (number < objects_N).astype(np.float32))
    return canvas.finish()


def draw(folder: Path | str, seed: int = 0, train_per_class: int = 400, val_per_class: int = 60, size: int = 64) -> Path:
    """Draw the set: folder/{train,val}/CLASS/NNNN.jpg.

    The same arguments give the same files, byte for byte with the same Pillow. The set appears at its place whole or
    not at all; a folder that holds this set already is left as it is.

    Args:
        folder: where; must not exist, or be empty, or hold this very set.
        seed: of all randomness.
        train_per_class, val_per_class: pictures.
        size: width and height in pixels.

    Raises:
        UserError: the folder holds something else, or cannot be written.
    """
    folder = Path(folder)
    what = {
        "drawing": DRAWING,
        "seed": seed,
        "train_per_class": train_per_class,
        "val_per_class": val_per_class,
        "size": size,
    }
    if folder.exists():
        if _marker(folder) == what:
            return folder
        if not folder.is_dir() or any(folder.iterdir()):
            raise UserError(f"{folder}: holds something else already; give another folder or remove this one")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror}); give another folder") from None
    try:
        for split, (part, count) in enumerate((("train", train_per_class), ("val", val_per_class))):
            for label, name in enumerate(CLASSES):
                _draw_class(unfinished / part / name, np.random.default_rng([seed, split, label]), name, count, size)
        (unfinished / MARKER).write_text(json.dumps(what), encoding="utf-8")
        unfinished.chmod(0o755)  # mkdtemp's is private
        os.rename(unfinished, folder)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror}); free some space or give another") from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _draw_class(folder: Path, random: Generator, name: str, count: int, size: int) -> None:
    folder.mkdir(parents=True)
    for first in range(0, count, PICTURES_AT_ONCE):
        for number, picture in enumerate(
            pictures(random, name, min(PICTURES_AT_ONCE, count - first), size), start=first
        ):
            encoded = io.BytesIO()
            Image.fromarray(picture).save(encoded, "JPEG", quality=JPEG_QUALITY)
            (folder / f"{number:04}.jpg").write_bytes(encoded.getvalue())


def _marker(folder: Path) -> dict | None:
    try:
        return json.loads((folder / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
