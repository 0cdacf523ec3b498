"""Draws the sheet of a preview: each image with the boxes of its views, and its views next to it.

Lengths are in pixels of the sheet.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from unigrad_fast.images.preview_rows import Box, Row
from unigrad_fast.pipelines import View
from unigrad_fast.pipelines.presets import GLOBALS

MARGIN, GAP, FRAME = 28, 20, 3
HEAD, LINE, BADGE = 26, 18, 18  # heights of the line above a picture, a line of text, a number
VIEW = 224  # approximate side of the largest view
ORIGINAL = 320  # width reserved for the original
NARROWEST = 124  # smallest width of a view with its text
LEGEND = (
    "Left: the image and where each view is cropped. Right: the views as the network sees them, with the crop's "
    "share of the image's area above, and the operations applied below (blur with its sigma, pixels)."
)
MIXED = " Mixed: the global views of the online branch, with a box of another image."
GLOBAL_COLOURS = ("#D55E00", "#0072B2")  # of Okabe and Ito, safe for colour blindness
LOCAL_COLOURS = ("#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#882255", "#F0E442")
INK, FAINT, RULE, PAPER = "#1A1A1A", "#666666", "#DDDDDD", "#FFFFFF"


class Layout:
    """Positions on the sheet.

    Attributes:
        zoom: sheet pixels per pixel of a view, the same for all views; a whole number unless it is below 1.
        sides: of each view as it is shown.
        places: left and top of the pixels of each view, from left and top of its row.
        mixed: the same of the mixed views.
        width, height: of a row.
        legend: lines under the title.
        top: of the first row.
    """

    def __init__(self, views: Sequence[View], mixed: bool) -> None:
        largest = max(view.size for view in views)
        self.zoom = VIEW / largest if largest > 1.25 * VIEW else max(1, round(VIEW / largest))
        self.sides = [max(1, round(view.size * self.zoom)) for view in views]
        left, first = ORIGINAL + GAP, self.sides[:GLOBALS]
        width, height = _cell(max(first))
        self.places = [(left + number * width + FRAME, HEAD + FRAME) for number in range(len(first))]
        self.mixed = [(x, y + height) for x, y in self.places] if mixed else []
        self.height = height * (2 if mixed else 1)
        left += width * len(first)
        if local := self.sides[GLOBALS:]:
            width, height = _cell(max(local))
            columns = -(-len(local) // max(1, round(self.height / height)))
            used = -(-len(local) // columns)
            height = max(height, self.height // used)
            self.height = max(self.height, height * used)
            for number in range(len(local)):
                row, column = divmod(number, columns)
                self.places.append((left + column * width + FRAME, row * height + HEAD + FRAME))
            left += width * columns
        self.width = left - GAP
        self.legend = wrapped((LEGEND + MIXED if mixed else LEGEND).split(), self.width)
        self.top = MARGIN + 34 + len(self.legend) * LINE + GAP

    @property
    def original_height(self) -> int:
        """Height reserved for the original."""
        return self.height - HEAD - LINE - 12

    def original_zoom(self, image: Image.Image) -> float:
        """Sheet pixels per pixel of an original: as many as fit, an integer from 2 on."""
        zoom = min(ORIGINAL / image.width, self.original_height / image.height)
        return int(zoom) if zoom >= 2 else zoom

    def row(self, number: int) -> tuple[int, int]:
        """Left and top coordinates of a row."""
        return MARGIN, self.top + number * (self.height + GAP)


def _cell(side: int) -> tuple[int, int]:
    """Width and height of a view with the text above and below, and the gap to the next."""
    return max(NARROWEST, side + 2 * FRAME) + GAP, HEAD + side + 2 * FRAME + 10 + 2 * LINE


@lru_cache
def load_font(size: int, bold: bool = False) -> ImageFont.FreeTypeFont:
    name = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
    home = find_spec("matplotlib").submodule_search_locations[0]  # importing it may fail by the user's settings
    return ImageFont.truetype(str(Path(home, "mpl-data/fonts/ttf", name)), size)


def wrapped(words: Sequence[str], width: int, font: ImageFont.FreeTypeFont | None = None) -> list[str]:
    """Breaks words into lines; without a font, into lines of the usual small text."""
    font = font or load_font(13)
    lines = [words[0]]
    for word in words[1:]:
        longer = f"{lines[-1]} {word}"
        if font.getlength(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


def shortened(name: str, width: int, font: ImageFont.FreeTypeFont) -> str:
    """A file name, with the middle replaced by … if it is too long."""
    for keep in range(len(name), 0, -1):
        text = name if keep == len(name) else f"{name[: keep // 2]}…{name[len(name) - (keep + 1) // 2 :]}"
        if font.getlength(text) <= width:
            return text
    return "…"


def draw(rows: Sequence[Row], views: Sequence[View], title: Sequence[str]) -> Image.Image:
    """Draws some images and their views.

    Args:
        rows: what `collect` found.
        views: of the preset.
        title: the name, then further texts.
    """
    layout = Layout(views, bool(rows[0].mixed))
    left, end = layout.row(len(rows))
    sheet = Image.new("RGB", (layout.width + 2 * MARGIN, end - GAP + MARGIN), PAPER)
    pen = ImageDraw.Draw(sheet)
    pen.text((left, MARGIN), title[0], INK, load_font(22, bold=True))
    beside = left + load_font(22, bold=True).getlength(title[0]) + 14
    pen.text((beside, MARGIN + 6), "   ".join(title[1:]), FAINT, load_font(16))
    _write(pen, left, MARGIN + 34, layout.legend)
    for number, row in enumerate(rows):
        left, top = layout.row(number)
        pen.line((left, top - GAP // 2, left + layout.width, top - GAP // 2), RULE)
        _draw_original(sheet, left, top, layout, number, row)
        for view, (x, y) in enumerate(layout.places):
            share, done = row.share(view), row.applied[view] or ["crop only"]
            head = f"{100 * share:.{int(share < 0.1)}f} % of area"
            _draw_view(sheet, left + x, top + y, layout.sides[view], view, row.views[view], head, done)
        for view, (x, y) in enumerate(layout.mixed):
            mixed, side = row.mixed[view], layout.sides[view]
            _draw_view(sheet, left + x, top + y, side, view, mixed.pixels, "mixed", mixed.shares())
            if mixed.ratio < 1:
                _outline(pen, _placed(mixed.box, layout.zoom, left + x, top + y), PAPER, 2)
    return sheet


def _draw_original(sheet: Image.Image, left: int, top: int, layout: Layout, number: int, row: Row) -> None:
    """Draws the whole image with its boxes, as large as fits; small images are enlarged by an integer."""
    pen = ImageDraw.Draw(sheet)
    image = row.original
    head, bold = f"image {number + 1}", load_font(14, bold=True)
    pen.text((left, top + 3), head, INK, bold)
    pen.text((left + bold.getlength(head) + 12, top + 4), f"{image.width} × {image.height} px", FAINT, load_font(13))
    zoom = layout.original_zoom(image)
    size = max(1, round(image.width * zoom)), max(1, round(image.height * zoom))
    shown = image.resize(size, Image.Resampling.NEAREST if zoom >= 2 else Image.Resampling.LANCZOS)
    top += HEAD
    sheet.paste(shown, (left, top))
    pen.text((left, top + size[1] + 4), shortened(row.name, ORIGINAL, load_font(13)), FAINT, load_font(13))
    taken: list[list[int]] = []
    boxes = [_placed(box, zoom, left, top) for box in row.boxes]
    for view, box in enumerate(boxes):
        _outline(pen, box, _colour(view), 3 if view < GLOBALS else 2)
    for view, box in enumerate(boxes):
        spot = _free_spot(box, taken, (left, top, left + ORIGINAL, top + layout.original_height))
        taken.append(spot)
        _badge(pen, spot[0], spot[1], view)


def _free_spot(box: Sequence[int], taken: list[list[int]], within: Box) -> list[int]:
    """A free position for the number of a box: in one of its corners, or nearby."""
    left, top, right, bottom = box
    corners = [(left, top), (right - BADGE, top), (left, bottom - BADGE), (right - BADGE, bottom - BADGE)]
    steps = range(-16 * (BADGE + 1), 17 * (BADGE + 1), BADGE + 1)
    # Try positions to the right and below before those to the left or above.
    near = sorted(((x, y) for x in steps for y in steps), key=lambda step: (min(step) < 0, abs(step[1]), abs(step[0])))
    for x, y in [*corners, *((left + across, top + down) for across, down in near)]:
        spot = [x, y, x + BADGE, y + BADGE]
        inside = within[0] <= x and within[1] <= y and spot[2] <= within[2] and spot[3] <= within[3]
        if inside and all(spot[2] <= a or c <= x or spot[3] <= b or d <= y for a, b, c, d in taken):
            return spot
    return [left, top, left + BADGE, top + BADGE]


def _draw_view(
    sheet: Image.Image, left: int, top: int, side: int, view: int, pixels: np.ndarray, head: str, done: list[str]
) -> None:
    """Draws a view in its frame, with its number and a text above, and the operations below."""
    pen = ImageDraw.Draw(sheet)
    _badge(pen, left - FRAME, top - FRAME - BADGE - 4, view)
    pen.text((left - FRAME + BADGE + 7, top - FRAME - BADGE - 3), head, INK, load_font(13))
    pen.rectangle((left - FRAME, top - FRAME, left + side + FRAME - 1, top + side + FRAME - 1), _colour(view))
    picture = Image.fromarray(pixels)
    whole = side % picture.width == 0
    picture = picture.resize((side, side), Image.Resampling.NEAREST if whole else Image.Resampling.LANCZOS)
    sheet.paste(picture, (left, top))
    lines = wrapped([f"{name}," for name in done[:-1]] + done[-1:], max(NARROWEST, side))
    _write(pen, left - FRAME, top + side + FRAME + 5, lines)


def _badge(pen: ImageDraw.ImageDraw, left: int, top: int, view: int) -> None:
    """Draws the number of a view on its colour."""
    colour = _colour(view)
    pen.rounded_rectangle((left, top, left + BADGE - 1, top + BADGE - 1), 4, colour)
    red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    ink = INK if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else PAPER
    text = str(view + 1)
    pen.text((left + BADGE / 2, top + BADGE / 2), text, ink, load_font(12 if len(text) == 1 else 10, bold=True), "mm")


def _outline(pen: ImageDraw.ImageDraw, box: Sequence[int], colour: str, width: int) -> None:
    """Draws the border of a box with a thin dark line around it, visible on any image."""
    left, top, right, bottom = box
    right, bottom = max(right, left + 1), max(bottom, top + 1)
    pen.rectangle((left - 1, top - 1, right, bottom), outline=INK)
    pen.rectangle((left, top, right - 1, bottom - 1), outline=colour, width=width)


def _placed(box: Box, zoom: float, left: int, top: int) -> list[int]:
    """A box of a picture on the sheet, by the picture's zoom and its left and top."""
    return [start + round(side * zoom) for side, start in zip(box, (left, top, left, top), strict=True)]


def _colour(view: int) -> str:
    return GLOBAL_COLOURS[view] if view < GLOBALS else LOCAL_COLOURS[(view - GLOBALS) % len(LOCAL_COLOURS)]


def _write(pen: ImageDraw.ImageDraw, left: int, top: int, lines: Sequence[str]) -> None:
    for number, line in enumerate(lines):
        pen.text((left, top + number * LINE), line, FAINT, load_font(13))
