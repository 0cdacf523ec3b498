"""`unigrad-fast data preview`: a picture of what an augmentation makes of a few images.

The views come out of the loader that training uses, the boxes out of the function that gives it its random numbers.

Shapes: S the side of a view, pixels.
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from unigrad_fast.pipelines import CutMix, Loader, Manifest, View
from unigrad_fast.pipelines.parameters import Parameters, sample
from unigrad_fast.pipelines.recipes import DEVIATION, GLOBALS, MEAN
from unigrad_fast.pipelines.recipes import recipe as make_recipe
from unigrad_fast.runtime.errors import UserError
from unigrad_fast.runtime.validation import count
from unigrad_fast.runtime.whole_file import write_whole

Box = tuple[int, int, int, int]  # left, top, right, bottom, pixels


@dataclass(frozen=True)
class Mixed:
    """A global view with a box of another image.

    Attributes:
        pixels: uint8 [S, S, 3].
        partner: which of the images the box comes from, from 0.
        ratio: share of the area that is still this image's; 1 where nothing was mixed.
        box: what was pasted, in the view.
    """

    pixels: np.ndarray
    partner: int
    ratio: float
    box: Box

    def shares(self) -> list[str]:
        """Whose the area is, for people, who count images from 1."""
        if self.ratio == 1:
            return ["not mixed"]
        own = round(100 * self.ratio)
        return [f"{own} % its own", f"{100 - own} % of image {self.partner + 1}"]


@dataclass(frozen=True)
class Row:
    """One image and its views.

    Attributes:
        name: of the file.
        original: the whole image, RGB.
        boxes: the crop of each view, in the image.
        views: uint8 [S, S, 3] each, as the network sees them, but for the normalisation.
        applied: what was done to each view after the crop.
        mixed: the global views after CutMix, if any.
    """

    name: str
    original: Image.Image
    boxes: list[Box]
    views: list[np.ndarray]
    applied: list[list[str]]
    mixed: list[Mixed] = field(default_factory=list)

    def share(self, number: int) -> float:
        """A crop's share of the image's area."""
        left, top, right, bottom = self.boxes[number]
        return (right - left) * (bottom - top) / (self.original.width * self.original.height)


def preview(
    path: Path,
    output: Path,
    recipe: str = "multicrop",
    images: int = 4,
    seed: int = 0,
    epoch: int = 0,
    cutmix: bool = False,
    image_size: int | None = None,
    local_crops: int | None = None,
    photometric: str = "dali",
    **changes: Mapping[str, Any],
) -> None:
    """Write the picture, a row per image: the first ones of an epoch's first batch.

    Args:
        path: of the images.
        output: PNG file to write; one that exists is replaced.
        recipe: name of the augmentation preset.
        images: how many rows; fewer if there are fewer images.
        seed, epoch: which of the training's views.
        cutmix: mix the global views, too.
        image_size, local_crops, changes: as in `pipelines.recipe`.
        photometric: as in `Loader`.

    Raises:
        UserError: the output cannot be written, or CutMix has no partner.
        DataError: the recipe does not exist or an image cannot be used.
    """
    if output.suffix.lower() != ".png":
        raise UserError(f"output = {output}: a PNG is written; give a name that ends in .png")
    if not os.path.isdir(output.parent):
        raise UserError(f"output = {output}: there is no folder {output.parent}; make it, or give another")
    if os.path.isdir(output):
        raise UserError(f"output = {output}: is a folder; give the name of a file")
    views = make_recipe(recipe, image_size, local_crops=local_crops, **changes)
    if (size := views[-1].size) > views[0].size:
        raise UserError(
            f"local_views.size = {size}: larger than the global views ({views[0].size}); give a smaller one"
        )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        manifest = Manifest.open(path)
    for warning in caught:
        print(f"warning: {warning.message}")
    readable = len(manifest) - len(manifest.unreadable())
    rows = collect(manifest, views, min(images, readable), seed, epoch, cutmix, photometric)
    title = [recipe, _summary(views), *(["CutMix"] if cutmix else []), f"seed {seed}", f"epoch {epoch}"]
    file = io.BytesIO()
    draw(rows, views, title).save(file, "PNG", optimize=True)
    try:
        write_whole(output, file.getvalue())
    except OSError as error:
        raise UserError(f"output = {output}: cannot be written: {error.strerror}; give another file") from error
    print(f"{count(len(rows), 'image')} as {recipe} makes them, in {output}")


def collect(
    manifest: Manifest,
    views: tuple[View, ...],
    images: int,
    seed: int,
    epoch: int,
    cutmix: bool = False,
    photometric: str = "dali",
) -> list[Row]:
    """The first images of an epoch with their views, from the loader."""
    if cutmix and images < 2:
        raise UserError(f"cutmix = true: mixes an image with another, and there is {count(images, 'image')}; give two")
    mixing = CutMix(group=images) if cutmix else None
    loader = Loader(manifest, views, images, seed, cutmix=mixing, photometric=photometric)
    step = epoch * loader.steps_per_epoch
    (batch,) = loader.iterate(step, step + 1)
    index = batch.index.numpy()
    asked = loader.indices(step)[1]  # other images may have taken the place of some, with their randomness
    drawn = [sample(view, number, seed, epoch, asked, manifest.sizes[index]) for number, view in enumerate(views)]
    pixels = [_pixels(view) for view in batch.views]
    rows = []
    for place, image in enumerate(index.tolist()):
        with Image.open(io.BytesIO(manifest.read(image))) as file:
            original = file.convert("RGB")
        rows.append(
            Row(
                name=Path(manifest.path(image)).name,
                original=original,
                boxes=[crop_box(parameters, place) for parameters in drawn],
                views=[view[place] for view in pixels],
                applied=[operations(parameters, place) for parameters in drawn],
            )
        )
    if batch.mix is not None:
        mix = batch.mix
        for view, mixed in enumerate(_pixels(view) for view in mix.apply(batch.views[:GLOBALS])):
            for place, row in enumerate(rows):
                box = tuple(mix.box[view, place].tolist())
                row.mixed.append(Mixed(mixed[place], int(mix.partner[view, place]), float(mix.ratio[view, place]), box))
    return rows


def crop_box(parameters: Parameters, place: int) -> Box:
    """The crop of one image."""
    left, top = int(parameters.x[place]), int(parameters.y[place])
    return left, top, left + int(parameters.width[place]), top + int(parameters.height[place])


def operations(parameters: Parameters, place: int) -> list[str]:
    """What is done to one image's view after the crop, in that order."""
    done = [name for name in ("jitter", "gray", "blur", "solarize", "flip") if getattr(parameters, name)[place]]
    return [f"blur {parameters.sigma[place]:.1f}" if name == "blur" else name for name in done]


def _pixels(view: torch.Tensor) -> np.ndarray:
    """uint8 [N, S, S, 3] of a normalised view, fp32 [N, 3, S, S]."""
    values = view.permute(0, 2, 3, 1).numpy() * np.float32(DEVIATION) + np.float32(MEAN)
    return np.rint(255 * values).clip(0, 255).astype(np.uint8)


def _summary(views: Sequence[View]) -> str:
    sizes = [(number < GLOBALS, view.size) for number, view in enumerate(views)]
    return " + ".join(f"{len(list(same))} × {size} px" for (_, size), same in groupby(sizes))


# The sheet. Lengths are in its pixels.

GLOBAL_COLOURS = ("#D55E00", "#0072B2")  # of Okabe and Ito, which the colour-blind tell apart
LOCAL_COLOURS = ("#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#882255", "#F0E442")
INK, FAINT, RULE, PAPER = "#1A1A1A", "#666666", "#DDDDDD", "#FFFFFF"
MARGIN, GAP, FRAME = 28, 20, 3
HEAD, LINE, BADGE = 26, 18, 18  # heights of the line above a picture, of a line of text, of a number
VIEW = 224  # side of the largest view, about
ORIGINAL = 320  # width of the place of the original
NARROWEST = 124  # of a view with its text
LEGEND = (
    "Left: the image and where each view is cropped. Right: the views as the network sees them, with the crop's "
    "share of the image's area above, and what was done to it beneath (blur with its sigma, pixels)."
)
MIXED = " Mixed: what the online branch sees of the global views, with a box of another image."


class Layout:
    """Where things stand.

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
        self.legend = _wrapped((LEGEND + MIXED if mixed else LEGEND).split(), self.width, _font(13))
        self.top = MARGIN + 34 + len(self.legend) * LINE + GAP

    @property
    def original_height(self) -> int:
        """Height of the place of the original."""
        return self.height - HEAD - LINE - 12

    def original_zoom(self, image: Image.Image) -> float:
        """Sheet pixels per pixel of an original: as many as fit, from 2 on a whole number."""
        zoom = min(ORIGINAL / image.width, self.original_height / image.height)
        return int(zoom) if zoom >= 2 else zoom

    def row(self, number: int) -> tuple[int, int]:
        """Left and top of a row."""
        return MARGIN, self.top + number * (self.height + GAP)


def _cell(side: int) -> tuple[int, int]:
    """Width and height of a view with what is written above and beneath, and the gap to the next."""
    return max(NARROWEST, side + 2 * FRAME) + GAP, HEAD + side + 2 * FRAME + 10 + 2 * LINE


def draw(rows: Sequence[Row], views: Sequence[View], title: Sequence[str]) -> Image.Image:
    """The picture of some images and their views.

    Args:
        rows: what `collect` found.
        views: the recipe.
        title: first the name, then what else is to be said.
    """
    layout = Layout(views, bool(rows[0].mixed))
    left, end = layout.row(len(rows))
    sheet = Image.new("RGB", (layout.width + 2 * MARGIN, end - GAP + MARGIN), PAPER)
    pen = ImageDraw.Draw(sheet)
    pen.text((left, MARGIN), title[0], INK, _font(22, bold=True))
    beside = left + _font(22, bold=True).getlength(title[0]) + 14
    pen.text((beside, MARGIN + 6), "   ".join(title[1:]), FAINT, _font(16))
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
                box = _scaled(mixed.box, layout.zoom)
                _outline(pen, [left + x + box[0], top + y + box[1], left + x + box[2], top + y + box[3]], PAPER, 2)
    return sheet


def _draw_original(sheet: Image.Image, left: int, top: int, layout: Layout, number: int, row: Row) -> None:
    """The whole image with its boxes, as large as its place allows; small ones in whole multiples."""
    pen = ImageDraw.Draw(sheet)
    image = row.original
    head, bold = f"image {number + 1}", _font(14, bold=True)
    pen.text((left, top + 3), head, INK, bold)
    pen.text((left + bold.getlength(head) + 12, top + 4), f"{image.width} × {image.height} px", FAINT, _font(13))
    zoom = layout.original_zoom(image)
    size = max(1, round(image.width * zoom)), max(1, round(image.height * zoom))
    shown = image.resize(size, Image.Resampling.NEAREST if zoom >= 2 else Image.Resampling.LANCZOS)
    top += HEAD
    sheet.paste(shown, (left, top))
    pen.text((left, top + size[1] + 4), _shortened(row.name, ORIGINAL, _font(13)), FAINT, _font(13))
    taken: list[list[int]] = []
    boxes = [_scaled(box, zoom) for box in row.boxes]
    boxes = [[left + box[0], top + box[1], left + box[2], top + box[3]] for box in boxes]
    for view, box in enumerate(boxes):
        _outline(pen, box, _colour(view), 3 if view < GLOBALS else 2)
    for view, box in enumerate(boxes):
        spot = _free_spot(box, taken, (left, top, left + ORIGINAL, top + layout.original_height))
        taken.append(spot)
        _badge(pen, spot[0], spot[1], view)


def _free_spot(box: Sequence[int], taken: list[list[int]], within: Box) -> list[int]:
    """Where the number of a box can stand without covering another: in a corner of it, else nearby."""
    left, top, right, bottom = box
    corners = [(left, top), (right - BADGE, top), (left, bottom - BADGE), (right - BADGE, bottom - BADGE)]
    steps = range(-16 * (BADGE + 1), 17 * (BADGE + 1), BADGE + 1)
    # Along the top and down, before what lies to the left or above.
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
    """A view in its frame, with its number and a text above, and what was done to it beneath."""
    pen = ImageDraw.Draw(sheet)
    _badge(pen, left - FRAME, top - FRAME - BADGE - 4, view)
    pen.text((left - FRAME + BADGE + 7, top - FRAME - BADGE - 3), head, INK, _font(13))
    pen.rectangle((left - FRAME, top - FRAME, left + side + FRAME - 1, top + side + FRAME - 1), _colour(view))
    picture = Image.fromarray(pixels)
    whole = side % picture.width == 0
    picture = picture.resize((side, side), Image.Resampling.NEAREST if whole else Image.Resampling.LANCZOS)
    sheet.paste(picture, (left, top))
    lines = _wrapped([f"{name}," for name in done[:-1]] + done[-1:], max(NARROWEST, side), _font(13))
    _write(pen, left - FRAME, top + side + FRAME + 5, lines)


def _badge(pen: ImageDraw.ImageDraw, left: int, top: int, view: int) -> None:
    """The number of a view on its colour."""
    colour = _colour(view)
    pen.rounded_rectangle((left, top, left + BADGE - 1, top + BADGE - 1), 4, colour)
    red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    ink = INK if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else PAPER
    text = str(view + 1)
    pen.text((left + BADGE / 2, top + BADGE / 2), text, ink, _font(12 if len(text) == 1 else 10, bold=True), "mm")


def _outline(pen: ImageDraw.ImageDraw, box: Sequence[int], colour: str, width: int) -> None:
    """A box with its colour inside its border and a thin dark line around, so that it is seen on any image."""
    left, top, right, bottom = box
    right, bottom = max(right, left + 1), max(bottom, top + 1)
    pen.rectangle((left - 1, top - 1, right, bottom), outline=INK)
    pen.rectangle((left, top, right - 1, bottom - 1), outline=colour, width=width)


def _scaled(box: Box, zoom: float) -> list[int]:
    return [round(side * zoom) for side in box]


def _colour(view: int) -> str:
    return GLOBAL_COLOURS[view] if view < GLOBALS else LOCAL_COLOURS[(view - GLOBALS) % len(LOCAL_COLOURS)]


@lru_cache
def _font(size: int, bold: bool = False) -> ImageFont.FreeTypeFont:
    name = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
    return ImageFont.truetype(str(Path(matplotlib.get_data_path(), "fonts/ttf", name)), size)


def _write(pen: ImageDraw.ImageDraw, left: int, top: int, lines: Sequence[str]) -> None:
    for number, line in enumerate(lines):
        pen.text((left, top + number * LINE), line, FAINT, _font(13))


def _wrapped(words: Sequence[str], width: int, font: ImageFont.FreeTypeFont) -> list[str]:
    """Lines of words that are not broken."""
    lines = [words[0]]
    for word in words[1:]:
        longer = f"{lines[-1]} {word}"
        if font.getlength(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


def _shortened(name: str, width: int, font: ImageFont.FreeTypeFont) -> str:
    """A file name without its middle, where it is too long."""
    for keep in range(len(name), 0, -1):
        text = name if keep == len(name) else f"{name[: keep // 2]}…{name[len(name) - (keep + 1) // 2 :]}"
        if font.getlength(text) <= width:
            return text
    return "…"
