"""Draws images with their nearest neighbours: a row for each, the most similar first.

Lengths are in pixels of the sheet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw

from unigrad_fast.images.preview_sheet import FAINT, GAP, INK, LINE, MARGIN, PAPER, RULE, load_font, shortened, wrapped
from unigrad_fast.runtime.fallback import harmless, printable

TILE, FRAME, BETWEEN = 128, 3, 12
PER_LINE = 10  # neighbours; further ones go below
HEIGHT = TILE + 2 * FRAME + 6 + 3 * LINE + 8  # of a picture with its texts
SAME, OTHER, UNKNOWN = "#0072B2", "#D55E00", "#999999"  # of Okabe and Ito, safe for colour blindness


@dataclass(frozen=True)
class Tile:
    """A picture with the texts below it.

    Attributes:
        picture: as large as it is drawn.
        texts: at most three, of which the first stands out.
        colour: of the frame.
    """

    picture: Image.Image
    texts: Sequence[str]
    colour: str


def reduced(pixels: np.ndarray) -> Image.Image:
    """A whole image as large as fits into a tile; small images are enlarged by an integer."""
    height, width = pixels.shape[:2]
    zoom = min(TILE / width, TILE / height)
    zoom = int(zoom) if zoom >= 2 else zoom
    size = max(1, round(width * zoom)), max(1, round(height * zoom))
    how = Image.Resampling.NEAREST if zoom >= 2 else Image.Resampling.LANCZOS
    return Image.fromarray(pixels).resize(size, how)


def draw(rows: Sequence[tuple[Tile, Sequence[Tile]]], title: str, legend: str) -> Image.Image:
    """Draws each query at the left and its neighbours to the right.

    Args:
        title: in bold.
        legend: the text below it.
    """
    step, texts = TILE + 2 * FRAME + BETWEEN, TILE + 2 * FRAME
    columns = min(PER_LINE, max(len(found) for _, found in rows))
    left = MARGIN + step + 2 * GAP  # of the neighbours
    width = max(left + columns * step - BETWEEN, 480) + MARGIN
    bold, lines = load_font(20, bold=True), wrapped(harmless(printable(legend)).split(), width - 2 * MARGIN)
    heading = wrapped(harmless(printable(title)).split(), width - 2 * MARGIN, bold)
    top = MARGIN + 26 * len(heading) + LINE * len(lines) + GAP
    heights = [HEIGHT * -(-len(found) // PER_LINE) + GAP for _, found in rows]
    sheet = Image.new("RGB", (width, top + sum(heights) - GAP + MARGIN), PAPER)
    pen = ImageDraw.Draw(sheet)
    for number, line in enumerate(heading):
        shown = shortened(line, width - 2 * MARGIN, bold)  # a word may be longer
        pen.text((MARGIN, MARGIN + 26 * number - 4), shown, INK, bold)
    for number, line in enumerate(lines):
        pen.text((MARGIN, MARGIN + 26 * len(heading) + LINE * number), line, FAINT, load_font(13))
    for (query, found), height in zip(rows, heights, strict=True):
        pen.line((MARGIN, top - GAP // 2, width - MARGIN, top - GAP // 2), RULE)
        _draw_tile(sheet, MARGIN, top, query, texts)
        for number, tile in enumerate(found):
            line, column = divmod(number, PER_LINE)
            _draw_tile(sheet, left + column * step, top + line * HEIGHT, tile, texts)
        top += height
    return sheet


def _draw_tile(sheet: Image.Image, left: int, top: int, tile: Tile, width: int) -> None:
    pen, side = ImageDraw.Draw(sheet), TILE + 2 * FRAME
    pen.rectangle((left, top, left + side - 1, top + side - 1), PAPER, tile.colour, FRAME)
    spare = [(TILE - length) // 2 for length in tile.picture.size]
    sheet.paste(tile.picture, (left + FRAME + spare[0], top + FRAME + spare[1]))
    for number, text in enumerate(tile.texts):
        font, ink = load_font(13, bold=number == 0), INK if number == 0 else FAINT
        shown = shortened(harmless(printable(text)), width, font)
        pen.text((left, top + side + 4 + number * LINE), shown, ink, font)
