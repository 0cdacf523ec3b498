"""A labelled set of small JPEG pictures, drawn: the data of the quickstart.

A class is a shape filled with a pattern. Each picture shows two to four such objects; their colours, positions,
sizes, directions and shading differ inside one picture as much as between pictures, and so does the light on
them, and the background with its clutter. What all crops of a picture share is the class and little else, so
pixels and colours say next to nothing about it, and an encoder that learns what crops have in common finds it.

All arithmetic runs over a batch of pictures at once, in float32, in coordinates that run from -1 to 1 over the
picture. Legend of shapes: N pictures, S pixels per side.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]

TAU = 2 * np.pi
LUMINANCE_SPLIT = 0.6  # the two colours of a pattern differ in brightness at least this far
PICTURES_AT_ONCE = 40  # the arrays of a batch stay in the cache
JPEG_QUALITY = 90
MARKER = ".synthetic.json"
DRAWING = 1  # raise when pictures change: older sets are then refused, not taken for the new ones


# Shapes: signed distance to the outline (negative inside), about 1 from the centre to the farthest point.


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
    return (normal_x * (radius * np.cos(angle) - tip) + normal_y * radius * np.sin(angle)) / np.hypot(
        normal_x, normal_y
    )


def _cross(x: Array, y: Array) -> Array:
    x, y = np.abs(x), np.abs(y)
    return np.minimum(np.maximum(x - 0.95, y - 0.36), np.maximum(y - 0.95, x - 0.36))


def _ring(x: Array, y: Array) -> Array:
    return np.abs(np.hypot(x, y) - 0.68) - 0.27


def _crescent(x: Array, y: Array) -> Array:
    return np.maximum(np.hypot(x, y) - 0.95, 0.7 - np.hypot(x - 0.55, y))
