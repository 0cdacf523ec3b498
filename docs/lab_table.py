"""The table of docs/plan.md for one or two GPUs: recipes in as few micro-batches as fit; nothing is measured.

    python docs/lab_table.py

One step of each recipe is counted per number of GPUs; other cards and micro-batches are arithmetic on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from unigrad_fast.config import resolve
from unigrad_fast.dry_run.cards import Card
from unigrad_fast.planning import Counted, Plan
from unigrad_fast.runtime.quiet import without_warnings

RECIPES, GPUS = ("imagenet_100ep", "imagenet_100ep_multicrop"), (1, 2)
CARDS = ("rtx3090", "rtx4090", "rtx5090", "l40s", "a100", "h100", "h200", "b200")
IMAGES, WALKED = 1_281_167, 32  # ImageNet's; at once on a card in the counted step
HEAD = (
    "| recipe | GPUs | `engine.accumulation_steps` | images at once | GiB | ms | images/s (range) | hours | bound by |"
)


def rows(recipe: str, ranks: int) -> Iterator[str]:
    """The rows of a recipe on so many cards of each kind."""
    config = resolve(recipe, {"output": "/nowhere", "data": {"train": "/nowhere"}, "engine": {"precision": "bf16"}})
    batch, epochs = config.data.batch_size, config.schedule.epochs
    walked = config.model_copy(update={"data": config.data.model_copy(update={"batch_size": WALKED * ranks})})
    with without_warnings():
        counted = Counted.of(walked, ranks, Card.of(CARDS[0]))
    for key in CARDS:
        on_card = Counted(walked, counted.found.on(Card.of(key)))
        plan = smallest(on_card, batch)
        slow, fast = (f"{end.images_per_second:,.0f}" for end in on_card.ends(plan))
        cells = (
            recipe,
            f"{ranks} × {on_card.card.name.removeprefix('NVIDIA ').removeprefix('GeForce ')}",
            f"{plan.setting.accumulation}",
            f"{plan.setting.images}",
            f"{plan.peak / 2**30:.1f}",
            f"{1e3 * plan.step:,.0f}",
            f"{plan.images_per_second:,.0f} ({slow} to {fast})",
            f"{plan.hours(IMAGES, epochs):,.0f}",
            plan.bound_by,
        )
        yield f"| {' | '.join(cells)} |"


def smallest(counted: Counted, batch: int) -> Plan:
    """The whole batch in as few micro-batches as fit."""
    setting, share = counted.setting(), batch // counted.ranks
    for parts in range(1, share + 1):
        if share % parts == 0:
            images, accumulation = share // parts, setting.accumulation * parts
            plan = counted.changed(replace(setting, images=images, accumulation=accumulation))
            if plan.peak <= counted.card.usable_memory:
                return plan
    raise ValueError(f"{counted.card.name} is too small for one image")


def main() -> None:
    print(HEAD)
    print("|" + "---|" * (HEAD.count("|") - 1))
    for recipe in RECIPES:
        for ranks in GPUS:
            print(*rows(recipe, ranks), sep="\n", flush=True)


if __name__ == "__main__":
    main()
