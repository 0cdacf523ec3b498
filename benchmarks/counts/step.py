"""Launches, memory traffic, FLOPs and communication of a training step on several GPUs, counted without any.

    unigrad-fast bench step --dry_run true [--ranks 8] [--images 128] [--card h100|a100] [--recipe NAME]

See `unigrad_fast.dry_run`. Milliseconds are expected from the figures of `cards.json`, one operator after the other,
without the loader; nothing is measured. Rows are appended to OUTPUT/dry_step.jsonl.
"""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from unigrad_fast.benchmarks.harness.record import append
from unigrad_fast.config import resolve
from unigrad_fast.dry_run.cards import Card
from unigrad_fast.dry_run.walked import Walk
from unigrad_fast.dry_run.walking import walk
from unigrad_fast.runtime.console import new_console, table_of_figures
from unigrad_fast.runtime.files import require_folder
from unigrad_fast.runtime.quiet import without_warnings


def show(console: Console, found: Walk, card: Card, title: str, images: int) -> None:
    headers = ("part", "launches", "TFLOP", "GB read", "GB written", "expected ms")
    table = table_of_figures(*headers, title=title, title_justify="left")
    for name, part in found.parts.items():
        sizes = (f"{part.flops / 1e12:.2f}", f"{part.read / 1e9:.2f}", f"{part.written / 1e9:.2f}")
        table.add_row(name, f"{part.launches:,}", *sizes, f"{1e3 * part.seconds:.2f}")
    table.add_section()
    for kind, each in found.collectives.items():
        table.add_row(
            f"collectives: {kind}", f"{each.count:,}", "", f"{each.bytes / 1e9:.3f}", "", f"{1e3 * each.seconds:.2f}"
        )
    table.add_section()
    launches = sum(part.launches for part in found.parts.values()) + found.collective_count
    flops = sum(part.flops for part in found.parts.values())
    table.add_row("sum", f"{launches:,}", f"{flops / 1e12:.2f}", "", "", f"{1e3 * found.seconds:.2f}", style="bold")
    console.print(table)
    console.print(
        f"{found.collective_count} collectives; {images / found.seconds:,.0f} images/s expected without loader and "
        "overlap"
    )
    waits = f"the host waits for the device: {', '.join(found.waits)}" if found.waits else "the host never waits"
    console.print(f"{waits}; cards.json has the figures of {card.name}, with their sources")
    memory = ", ".join(f"{kind} {size / 2**30:.2f}" for kind, size in found.peak.items())
    console.print(f"peak memory, GiB: {memory}; total {sum(found.peak.values()) / 2**30:.2f}", soft_wrap=True)


def main(ranks: int, images: int, card: str, recipe: str, output: Path) -> None:
    """Walk a step, print the table and append a row, with the options of the command.

    Raises:
        UserError: an unknown card or recipe, or a setting that cannot be walked.
    """
    require_folder(output)
    figures = Card.of(card)
    config = resolve(recipe, {"output": "/nowhere", "data": {"train": "/nowhere", "batch_size": ranks * images}})
    with without_warnings():
        found = walk(config, ranks, figures)
    setting = {"recipe": config.recipe, "ranks": ranks, "images_per_rank": images, "counted_for": card}
    title = (
        f"Counted, not measured: a step of {config.recipe} on {ranks} x {figures.name}, {images} images each, "
        f"ZeRO stage {config.engine.zero_stage}"
    )
    show(new_console(), found, figures, title, ranks * images)
    print(f"row appended to {append(output, 'dry_step', [{**setting, **found.as_json()}])}")
