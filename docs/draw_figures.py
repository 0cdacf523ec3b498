"""Draws the pictures of the README from images and runs.

    python docs/draw_figures.py IMAGES RUN COLLAPSED_RUN

IMAGES: a folder of `unigrad-fast data synth`. RUN: the quickstart on it. COLLAPSED_RUN: the same with
`--objective.balance 0`.
"""

import shutil
import sys
from pathlib import Path

from PIL import Image

from unigrad_fast.training.telemetry.curves import draw, draw_comparison

DOCS = Path(__file__).resolve().parent
COLUMNS, GAP = 12, 2


def contact_sheet(train: Path, path: Path) -> None:
    """The first pictures of each class, a row per class."""
    rows = [sorted(folder.glob("*.jpg"))[:COLUMNS] for folder in sorted(train.iterdir())]
    side = Image.open(rows[0][0]).width + GAP
    sheet = Image.new("RGB", (COLUMNS * side - GAP, len(rows) * side - GAP), "white")
    for number, row in enumerate(rows):
        for column, file in enumerate(row):
            sheet.paste(Image.open(file), (column * side, number * side))
    sheet.save(path, optimize=True)


def main(images: Path, run: Path, collapsed: Path) -> None:
    contact_sheet(images / "train", DOCS / "images.png")
    shutil.copy(draw(run), DOCS / "quickstart.png")
    draw_comparison({"balance 10": run, "balance 0": collapsed}, DOCS / "collapse.png")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
