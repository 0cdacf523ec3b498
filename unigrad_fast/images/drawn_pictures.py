"""The pictures of the drawn image set, class by class.

A class is a shape filled with a pattern. Each picture shows four such objects on a cluttered background. Their
positions, sizes, directions, colours, contrast and shading differ inside one picture as much as between pictures,
and every picture has its own light, contrast, saturation and tint. Once the usual augmentations have changed the
light, two crops of a picture share the class and little else: pixels and colours say next to nothing about it, but an
encoder that learns what crops have in common finds it. Hues run through the rainbow inside each picture, because with
a palette of its own, crops of one picture could be told from all others without any shape.

All arithmetic is float32, over N pictures of one class at once, in coordinates that run from -1 to 1 over a
picture of S by S pixels. Arrays of points are [N, S, S]; parameters of a picture are [N, 1, 1].
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]

TAU = 2 * np.pi


# Shapes: distance to the outline, negative inside; the farthest point is about 1 from the centre.


def _disc(x: Array, y: Array) -> Array:
    return np.hypot(x, y) - 0.85


def _square(x: Array, y: Array) -> Array:
    return np.maximum(np.abs(x), np.abs(y)) - 0.75


def _triangle(x: Array, y: Array) -> Array:
    return np.maximum(-y, 0.866 * np.abs(x) + 0.5 * y) - 0.5


def _cross(x: Array, y: Array) -> Array:
    x, y = np.abs(x), np.abs(y)
    return np.minimum(np.maximum(x - 0.95, y - 0.36), np.maximum(y - 0.95, x - 0.36))


def _star(x: Array, y: Array) -> Array:
    sector = TAU / 5
    angle = np.abs(np.mod(np.arctan2(y, x) + sector / 2, sector) - sector / 2)
    radius = np.hypot(x, y)
    tip, notch_x, notch_y = 1.05, 0.45 * np.cos(sector / 2), 0.45 * np.sin(sector / 2)
    across = notch_y * (radius * np.cos(angle) - tip) + (tip - notch_x) * radius * np.sin(angle)
    return across / np.hypot(notch_y, tip - notch_x)


def _ring(x: Array, y: Array) -> Array:
    return np.abs(np.hypot(x, y) - 0.68) - 0.27


def _crescent(x: Array, y: Array) -> Array:
    return np.maximum(np.hypot(x, y) - 0.95, 0.7 - np.hypot(x - 0.55, y))


def _hexagon(x: Array, y: Array) -> Array:
    return np.maximum(np.abs(y), 0.866 * np.abs(x) + 0.5 * np.abs(y)) - 0.78


def _heart(x: Array, y: Array) -> Array:
    x, y = 0.58 * np.abs(x), 0.58 * y + 0.55
    along = np.maximum(x + y, 0) / 2
    lobe = np.hypot(x - 0.25, y - 0.75) - 0.35355
    side = np.minimum(np.hypot(x, y - 1), np.hypot(x - along, y - along)) * np.sign(x - y)
    return np.where(x + y > 1, lobe, side) / 0.58


def _drop(x: Array, y: Array) -> Array:
    tip = np.maximum(0.898 * np.abs(x) - 0.44 * (1 - y), -0.008 - y)
    return np.minimum(np.hypot(x, y + 0.25) - 0.55, tip)


# Patterns: a wave over (u, v) in periods, or over the object's own (x, y) for those with a centre. Positive where
# the first colour is, negative where the second is, about 1 to 3 at the extremes.


def _stripes(u: Array, v: Array) -> Array:
    return np.sin(TAU * u)


def _fine_stripes(u: Array, v: Array) -> Array:
    return np.sin(1.6 * TAU * u)


def _checks(u: Array, v: Array) -> Array:
    return 2 * np.sin(0.7 * TAU * u) * np.sin(0.7 * TAU * v)


def _dots(u: Array, v: Array) -> Array:
    return 3 * (np.cos(0.8 * TAU * u) + np.cos(0.8 * TAU * v) - 0.7)


def _zigzag(u: Array, v: Array) -> Array:
    return np.sin(TAU * (u + 0.5 * np.abs(2 * np.mod(0.8 * v, 1) - 1)))


def _bricks(u: Array, v: Array) -> Array:
    to_row = 0.5 - np.abs(np.mod(v, 1) - 0.5)
    to_end = 0.5 - np.abs(np.mod(u / 2 + np.mod(np.floor(v), 2) / 2, 1) - 0.5)
    return 8 * (np.minimum(to_row, 2 * to_end) - 0.13)


def _grid(u: Array, v: Array) -> Array:
    return 3 * (np.maximum(np.cos(0.8 * TAU * u), np.cos(0.8 * TAU * v)) - 0.75)


def _plain(x: Array, y: Array) -> Array:
    return np.full_like(x, 3)


def _circles(x: Array, y: Array) -> Array:
    return np.sin(1.9 * TAU * np.hypot(x, y))


def _spokes(x: Array, y: Array) -> Array:
    return 3 * np.sin(5 * np.arctan2(y, x))


CENTRED = (_plain, _circles, _spokes)

CLASSES: dict[str, tuple[Callable[[Array, Array], Array], Callable[[Array, Array], Array]]] = {
    "bricks-hexagon": (_hexagon, _bricks),
    "checked-square": (_square, _checks),
    "circled-drop": (_drop, _circles),
    "dotted-triangle": (_triangle, _dots),
    "fine-striped-crescent": (_crescent, _fine_stripes),
    "gridded-heart": (_heart, _grid),
    "plain-star": (_star, _plain),
    "spoked-ring": (_ring, _spokes),
    "striped-disc": (_disc, _stripes),
    "zigzag-cross": (_cross, _zigzag),
}


def _rotate(x: Array, y: Array, angle: Array) -> tuple[Array, Array]:
    cos, sin = np.cos(angle), np.sin(angle)
    return cos * x + sin * y, cos * y - sin * x


def draw_pictures(random: np.random.Generator, name: str, count: int, size: int) -> NDArray[np.uint8]:
    """Pictures [count, size, size, 3] of class `name`, a key of CLASSES; all chance comes from `random`."""
    shape, pattern = CLASSES[name]
    pixel = np.float32(2 / size)
    axis = (np.arange(size, dtype=np.float32) + 0.5) * pixel - 1
    x, y = axis[None, None, :], axis[None, :, None]

    def uniform(low: float, high: float, channels: int | None = None) -> Array:
        dims = (count, 1, 1) if channels is None else (count, 1, 1, channels)
        return random.uniform(low, high, dims).astype(np.float32)

    def angle() -> Array:
        return uniform(0, TAU)

    def sign() -> Array:
        return np.sign(uniform(-1, 1))

    def rainbow(low: float, high: float) -> Array:
        """Offsets of red, green and blue [N, S, S, 3] that go once round the hues as the phase grows by 2π."""
        phase = _rotate(x, y, angle())[0] * uniform(low, high) + angle()
        return np.stack([np.cos(phase), np.cos(phase - TAU / 3), np.cos(phase + TAU / 3)], axis=-1)

    def cover(distance: Array) -> Array:  # the share of a pixel inside an outline
        return np.clip(0.5 - distance / pixel, 0, 1)

    # Background: brightness between 3 x 3 random knots, hues, and two bars of any colour.
    knots = uniform(-0.12, 0.12, 9).reshape(count, 3, 3)
    weight = np.clip(1 - np.abs(axis[:, None] - np.array([-1, 0, 1], np.float32)), 0, 1)
    picture = 0.5 + (weight @ knots @ weight.T)[..., None] + 0.15 * rainbow(3, 5)
    for _ in range(2):
        a, b = _rotate(x - uniform(-1, 1), y - uniform(-1, 1), angle())
        bar = cover(np.maximum(np.abs(a) - uniform(0.05, 0.45), np.abs(b) - uniform(0.03, 0.15))) * uniform(0.3, 0.9)
        picture += (uniform(0.25, 0.75, 3) - picture) * bar[..., None]

    # Objects, near the corners of a turned and shifted square.
    turn, shift_x, shift_y = angle(), uniform(-0.3, 0.3), uniform(-0.3, 0.3)
    for corner_x, corner_y in ((-0.53, -0.53), (0.53, -0.53), (-0.53, 0.53), (0.53, 0.53)):
        centre_x, centre_y = _rotate(corner_x + uniform(-0.1, 0.1), corner_y + uniform(-0.1, 0.1), turn)
        from_x, from_y = x - centre_x - shift_x, y - centre_y - shift_y
        radius, stretch = uniform(0.48, 0.6), np.exp(uniform(-0.15, 0.15))
        a, b = _rotate(from_x, from_y, angle())
        a, b = a * sign() * stretch / radius, b / (stretch * radius)
        if pattern in CENTRED:
            wave = pattern(a, b)
        else:
            period = uniform(0.24, 0.28)
            u, v = _rotate(from_x, from_y, angle())
            wave = pattern(u / period + uniform(0, 1), v / period + uniform(0, 1))
        tone = np.tanh(2.5 * (wave + uniform(-0.35, 0.35)))  # -1 to 1; the offset varies how much is which colour
        colour = (uniform(0.44, 0.56) + uniform(0.24, 0.36) * sign() * tone)[..., None]
        colour = colour + 0.3 * rainbow(3, 6) * tone[..., None]
        colour *= (1 + uniform(0, 0.3) * _rotate(a, b, angle())[0])[..., None]
        picture += (colour - picture) * cover(shape(a, b) * radius)[..., None]

    # Light, saturation, contrast, tint, grain.
    picture *= (1 + uniform(0, 0.25) * _rotate(x, y, angle())[0])[..., None]
    grey = picture.mean(axis=-1, keepdims=True)
    picture = grey + (picture - grey) * uniform(0.4, 1.2, 1)
    picture = (picture - 0.5) * uniform(0.7, 1.05, 1) + uniform(0.4, 0.6, 1) + uniform(-0.06, 0.06, 3)
    picture += 0.02 * random.standard_normal(picture.shape, dtype=np.float32)
    return (np.clip(picture, 0, 1) * 255 + 0.5).astype(np.uint8)
