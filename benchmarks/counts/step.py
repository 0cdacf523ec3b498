"""Launches, memory traffic, FLOPs and communication of a training step on several GPUs, counted without any.

    unigrad-fast bench step --dry_run true [--ranks 8] [--images 128] [--card NAME] [--recipe NAME]

See `unigrad_fast.dry_run`. Milliseconds are expected from the figures of `cards.json`: the card's, one operator after
the other, and beside it the host's; nothing is measured. Rows are appended to OUTPUT/dry_step.jsonl.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from unigrad_fast import recipes
from unigrad_fast.benchmarks.harness.record import append
from unigrad_fast.config import resolve
from unigrad_fast.dry_run.cards import Card, Host
from unigrad_fast.dry_run.walked import Walk
from unigrad_fast.dry_run.walking import walk
from unigrad_fast.runtime.console import new_console, table_of_figures
from unigrad_fast.runtime.files import require_folder
from unigrad_fast.runtime.quiet import without_warnings
from unigrad_fast.training.telemetry.phases import PHASES


def show(console: Console, found: Walk, title: str, images: int) -> None:
    headers = ("part", "launches", "TFLOP", "GB read", "GB written", "expected ms")
    table = table_of_figures(*headers, title=title, title_justify="left")
    parts, collectives = found.parts, found.collectives
    for name, part in parts.items():
        sizes = (f"{part.flops / 1e12:.2f}", f"{part.read / 1e9:.2f}", f"{part.written / 1e9:.2f}")
        table.add_row(name, f"{part.launches:,}", *sizes, f"{1e3 * part.seconds:.2f}")
    table.add_section()
    for kind, each in collectives.items():
        table.add_row(
            f"collectives: {kind}", f"{each.count:,}", "", f"{each.bytes / 1e9:.3f}", "", f"{1e3 * each.seconds:.2f}"
        )
    table.add_section()
    flops = sum(part.flops for part in parts.values())
    card = f"{1e3 * found.of_card:.2f}"
    table.add_row("sum", f"{found.launches:,}", f"{flops / 1e12:.2f}", "", "", card, style="bold")
    console.print(table)
    host = Host.expected()
    console.print(_by_phase(found, host))
    for line in _expected(found, host, images):
        console.print(line, soft_wrap=True)
    waits = f"the host waits for the device: {', '.join(found.waits)}" if found.waits else "the host never waits"
    console.print(f"{waits}; cards.json has the figures of {found.card.name} and of the host, with their sources")
    memory = ", ".join(f"{kind} {size / 2**30:.2f}" for kind, size in found.peak.items())
    console.print(f"peak memory, GiB: {memory}; total {sum(found.peak.values()) / 2**30:.2f}", soft_wrap=True)


def _by_phase(found: Walk, host: Host) -> Table:
    card, launched = found.card_by_phase, found.host_by_phase(host)
    replayed = found.host_by_phase(host, replayed=True)
    table = table_of_figures("phase", "calls", "card, ms", "host, ms", "host, replaying a graph, ms")
    for phase in (*PHASES, "end", "graph"):
        calls = sum(found.calls[phase].values()) if phase in found.calls else 0
        cells = (f"{1e3 * each[phase]:.2f}" if phase in each else "" for each in (card, launched, replayed))
        table.add_row(phase, f"{calls:,}" if calls else "", *cells)
    table.add_section()
    sums = (f"{1e3 * sum(each.values()):.2f}" for each in (card, launched, replayed))
    table.add_row("sum", f"{sum(sum(calls.values()) for calls in found.calls.values()):,}", *sums, style="bold")
    return table


def _expected(found: Walk, host: Host, images: int) -> Iterator[str]:
    slow, fast = (found.on(card) for card in found.card.ends())
    for how, replayed in (("launched", False), ("replayed from a graph", True)):
        middle, low, high = (images / each.seconds(host, replayed) for each in (found, slow, fast))
        decides = "host" if found.of_host(host, replayed) > found.of_card else "card"
        yield (
            f"{how}: {1e3 * found.seconds(host, replayed):.1f} ms, the {decides}'s; {middle:,.0f} images/s expected "
            f"({low:,.0f} to {high:,.0f})"
        )
    yield f"{found.collective_count} collectives; nothing overlaps but the host with the card"


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
        f"Counted, not measured: a step of {recipes.title(recipe)} on {ranks} x {figures.name}, {images} images each, "
        f"ZeRO stage {config.engine.zero_stage}"
    )
    show(new_console(), found, title, ranks * images)
    print(f"row appended to {append(output, 'dry_step', [{**setting, **found.as_json()}])}")
