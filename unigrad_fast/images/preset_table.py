"""`unigrad-fast data presets`: the augmentation presets as a table, for the terminal or for the documentation."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from itertools import groupby

from rich import box
from rich.table import Table

from unigrad_fast.pipelines.presets import GLOBALS, PRESETS, View
from unigrad_fast.runtime.console import new_console

WIDTH = 100  # columns of a terminal that fits every row on one line
COLUMNS = {  # short for the terminal, and in full
    "preset": "preset",
    "views": "views",
    "px": "pixels",
    "scale": "scale",
    "ratio": "ratio",
    "resize": "interpolation",
    "jitter": "jitter",
    "p": "jitter p",
    "gray": "gray p",
    "blur": "blur p",
    "sigma": "blur sigma",
    "solar": "solarize p",
    "flip": "flip p",
}
LEGEND = """\
scale: share of the image's area that a crop takes. ratio: width / height of the crop, in the image.
jitter: strength of brightness, contrast, saturation and hue, applied with probability p.
gray, blur, solar (solarize), flip: probabilities. sigma: deviation of the blur, pixels of the view."""
OVERRIDES = """\
To choose a preset, and to change its number of local crops, and values of both global views, of the
second global view or of the local views, add to `unigrad-fast pretrain`:
  --data.preset multicrop --data.local_crops 4 --data.global_views.scale 0.3,1
  --data.second_view.blur_probability 0.2 --data.local_views.size 64"""


def show(markdown: bool = False) -> None:
    """Print the presets, where they are published, and how to change them."""
    if markdown:
        print(as_markdown())
        return
    console = new_console()
    console.width = min(WIDTH, console.width) if console.is_terminal else WIDTH
    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    for column in COLUMNS:
        table.add_column(column)
    for name, *cells in rows():
        if name and table.row_count:
            table.add_row()
        table.add_row(name, *cells)
    console.print(table)
    width = max(map(len, PRESETS))
    sources = "\n".join(f"  {name:{width}}  {preset.source}" for name, preset in PRESETS.items())
    console.print(f"\n{LEGEND}\n\nSources:\n{sources}\n\n{OVERRIDES}")


def as_markdown() -> str:
    """The presets as a table, and the list of their sources."""
    lines = [[*COLUMNS.values()], ["---"] * len(COLUMNS)]
    lines += [[name and f"`{name}`", *cells] for name, *cells in rows()]
    table = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([*table, "", *(f"- `{name}`: {preset.source}" for name, preset in PRESETS.items())])


def rows() -> Iterator[list[str]]:
    """Cells of `COLUMNS` for every distinct view; only the first view of a preset has its name."""
    for name, preset in PRESETS.items():
        first = 0
        views = [(number < GLOBALS, view) for number, view in enumerate(preset.views)]
        for (is_global, view), same in groupby(views):
            number = len(list(same))
            kind = "global" if is_global else "local"
            alone = is_global and number == 1 < len(views)
            which = f"{kind} {first + 1}" if alone else f"{number} {kind}"
            yield ["" if first else name, which, *_values(view)]
            first += number


def _values(view: View) -> list[str]:
    return [
        str(view.size),
        _range(view.scale),
        "–".join(str(Fraction(side).limit_denominator(100)) for side in view.ratio),
        view.interpolation,
        " ".join(f"{strength:g}" for strength in view.jitter) if view.jitter_probability else "–",
        _probability(view.jitter_probability),
        _probability(view.gray_probability),
        _probability(view.blur_probability),
        _range(view.blur_sigma) if view.blur_probability else "–",
        _probability(view.solarize_probability),
        _probability(view.flip_probability),
    ]


def _range(limits: tuple[float, float]) -> str:
    return "–".join(f"{limit:g}" for limit in limits)


def _probability(value: float) -> str:
    return f"{value:g}" if value else "–"
