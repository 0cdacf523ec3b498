"""The tables of docs/wide.md: memory and time of wide projectors, counted by the dry run; nothing is measured.

    python docs/wide_table.py

ResNet-50 at 224 pixels with a projector of 3 layers, in bf16, 128 images on each GPU. Times are expected for an H100;
`objectives.placement` counts those of the objective.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from unigrad_fast.config import Config, resolve
from unigrad_fast.dry_run.cards import Card
from unigrad_fast.dry_run.walked import Walk
from unigrad_fast.dry_run.walking import walk
from unigrad_fast.objectives.placement import choose, seconds
from unigrad_fast.planning import WIDTHS
from unigrad_fast.runtime.quiet import without_warnings

CARDS, IMAGES = (1, 8, 64), 128
FEATURES, DEPTH = 2048, 3  # of ResNet-50, and of the paper's projector
MOST = "activations, gradients and what passes"

SIZES = (
    "| C | GPUs | GiB at stages 0, 1, 2 | lowest stage that fits into 80 GiB | weights | master weights, momentum "
    "| target | F | the rest | GB in collectives | objective, ms: replicated | sharded | `auto` |"
)
RECOMPUTED = (
    "| C | views | GB kept by the projector | with recomputation | GiB in total | with recomputation | expected ms | "
    "with recomputation |"
)


@dataclass(frozen=True)
class Setting:
    """A step of ResNet-50 on so many cards."""

    width: int
    ranks: int
    stage: int = 0
    multi_crop: bool = False
    recompute: bool = False

    def config(self) -> Config:
        return resolve(
            "imagenet_100ep_multicrop" if self.multi_crop else "imagenet_100ep",
            {
                "output": "/nowhere",
                "data": {"train": "/nowhere", "batch_size": self.ranks * IMAGES},
                "model": {"projector": {"width": self.width, "depth": DEPTH}},
                "engine": {"zero_stage": self.stage, "precision": "bf16", "recompute_projector": self.recompute},
            },
        )

    def walk(self) -> Walk:
        with without_warnings():
            return walk(self.config(), self.ranks, Card.of("h100"))


def size_row(width: int, ranks: int) -> str:
    """A row of the first table."""
    walks = {stage: Setting(width, ranks, stage).walk() for stage in ((0,) if ranks == 1 else (0, 1, 2))}
    fitting = [stage for stage, found in walks.items() if sum(found.peak.values()) <= Card.of("h100").usable_memory]
    found = walks[fitting[0] if fitting else max(walks)]
    kinds = {
        "weights": ("weights",),
        "moved": ("master weights", "momentum"),
        "target": ("target", "the target's weights in half precision"),
        "F": ("correlation",),
        "rest": (MOST, "running statistics"),
    }
    sizes = [sum(found.peak.get(name, 0) for name in names) for names in kinds.values()]
    sent = sum(each.bytes for each in found.collectives.values()) / 1e9
    cells = [
        f"{width}",
        f"{ranks}",
        ", ".join(gib(sum(each.peak.values())) for each in walks.values()),
        f"{fitting[0]}" if fitting else "none",
        *map(gib, sizes),
        f"{sent:.2f}" if ranks > 1 else "–",
        *objective_cells(width, ranks),
    ]
    return f"| {' | '.join(cells)} |"


def objective_cells(width: int, ranks: int) -> tuple[str, str, str]:
    """Expected milliseconds in both placements, and what `auto` is."""
    arguments = (width, IMAGES, 2, ranks)
    sharded = f"{1e3 * seconds('sharded', *arguments):.2f}" if ranks > 1 else "–"
    return f"{1e3 * seconds('replicated', *arguments):.2f}", sharded, choose(*arguments)


def kept(width: int, views: int, again: bool) -> int:
    """Bytes that the projector keeps from forward to backward, beside its input: of each hidden layer its product, and
    unless that is computed again the ReLU's result and autocast's copies of all weights."""
    products = 2 * views * IMAGES * width * (DEPTH - 1)
    return products if again else 2 * products + 2 * (FEATURES * width + (DEPTH - 1) * width**2)


def recomputed_row(width: int, multi_crop: bool) -> str:
    """A row of the second table: 8 cards at stage 2, without and with `engine.recompute_projector`."""
    views = 8 if multi_crop else 2
    walks = [Setting(width, 8, 2, multi_crop, again).walk() for again in (False, True)]
    cells = [
        f"{width}",
        f"{views}",
        *(f"{kept(width, views, again) / 1e9:.2f}" for again in (False, True)),
        *(gib(sum(found.peak.values())) for found in walks),
        *(f"{1e3 * found.of_card:.1f}" for found in walks),
    ]
    return f"| {' | '.join(cells)} |"


def gib(size: int) -> str:
    return f"{size / 2**30:.2f}"


def rows() -> Iterator[str]:
    """Both tables, line by line."""
    yield from (SIZES, "|" + "---|" * (SIZES.count("|") - 1))
    yield from (size_row(width, ranks) for width in WIDTHS for ranks in CARDS)
    yield ""
    yield from (RECOMPUTED, "|" + "---|" * (RECOMPUTED.count("|") - 1))
    yield from (recomputed_row(width, multi_crop) for width in WIDTHS if width != 4096 for multi_crop in (False, True))


if __name__ == "__main__":
    for row in rows():
        print(row, flush=True)
