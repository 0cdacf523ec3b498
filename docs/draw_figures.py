"""Draws the pictures of the README and of the documentation from images and runs.

    python docs/draw_figures.py IMAGES RUN COLLAPSED_RUN

IMAGES: a folder of `unigrad-fast data synth`. RUN: the quickstart on it. COLLAPSED_RUN: the same with
`--objective.balance 0`.
"""

import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image

from unigrad_fast import cli
from unigrad_fast.training.telemetry.curves import draw, draw_comparison

DOCS = Path(__file__).resolve().parent
COLUMNS, GAP = 12, 2
SEARCHED = ("gridded-heart/0003.jpg", "spoked-ring/0001.jpg", "dotted-triangle/0005.jpg")


def contact_sheet(train: Path, path: Path) -> None:
    """The first pictures of each class, a row per class."""
    rows = [sorted(folder.glob("*.jpg"))[:COLUMNS] for folder in sorted(train.iterdir())]
    side = Image.open(rows[0][0]).width + GAP
    sheet = Image.new("RGB", (COLUMNS * side - GAP, len(rows) * side - GAP), "white")
    for number, row in enumerate(rows):
        for column, file in enumerate(row):
            sheet.paste(Image.open(file), (column * side, number * side))
    sheet.save(path, optimize=True)


def judgements(images: Path, run: Path) -> None:
    """What `evaluate retrieve`, `confusion` and `map` draw."""
    given = {"retrieve": [*(str(images / "val" / name) for name in SEARCHED), "--k", "5"], "confusion": [], "map": []}
    with TemporaryDirectory() as folder:
        for name, words in given.items():
            if cli.main(["evaluate", name, str(run), *words, "--output", folder]) != 0:
                raise SystemExit(f"evaluate {name} has failed")
            (drawn,) = Path(folder).glob(f"{name}-*.png")
            picture = Image.open(drawn).convert("RGB")
            # The usual method forgets colours of few pixels, such as those of a legend.
            small = picture.quantize(method=Image.Quantize.MAXCOVERAGE, kmeans=3, dither=Image.Dither.NONE)
            small.save(DOCS / f"{name}.png", optimize=True)


def main(images: Path, run: Path, collapsed: Path) -> None:
    contact_sheet(images / "train", DOCS / "images.png")
    shutil.copy(draw(run), DOCS / "quickstart.png")
    judgements(images, run)
    draw_comparison({"balance 10": run, "balance 0": collapsed}, DOCS / "collapse.png")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
