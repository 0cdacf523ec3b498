"""The layout of a preview sheet, and the lengths of its texts. Lengths are in pixels of the sheet."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from PIL import Image, ImageFont

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
        self.legend = wrapped((LEGEND + MIXED if mixed else LEGEND).split(), self.width, load_font(13))
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
    home = next(
        iter(find_spec("matplotlib").submodule_search_locations)
    )  # importing it may fail by the user's settings
    return ImageFont.truetype(str(Path(home, "mpl-data/fonts/ttf", name)), size)


def wrapped(words: Sequence[str], width: int, font: ImageFont.FreeTypeFont) -> list[str]:
    """Breaks words into lines."""
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
