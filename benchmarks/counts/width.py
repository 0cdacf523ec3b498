"""A training step at several projector widths on several GPUs, counted without any.

    unigrad-fast bench width --dry_run true --recipe imagenet_100ep [--ranks 8] [--images 128] [--card NAME]

See `unigrad_fast.dry_run`. The objective's share is that of the expected time, without its collectives. Rows are
appended to OUTPUT/dry_width.jsonl.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from unigrad_fast.benchmarks.harness.record import append
from unigrad_fast.benchmarks.harness.run_config import at_width, changed
from unigrad_fast.config import Config
from unigrad_fast.dry_run.cards import Card, Host
from unigrad_fast.dry_run.walked import Walk
from unigrad_fast.dry_run.walking import walk
from unigrad_fast.planning import WIDTHS
from unigrad_fast.runtime.console import new_console, table_of_figures
from unigrad_fast.runtime.files import require_folder
from unigrad_fast.runtime.quiet import without_warnings


def main(config: Config, widths: Sequence[int] | None, ranks: int, images: int, card: str, output: Path) -> None:
    """Walk a step of every width, print the table and append the rows, with the options of the command.

    Args:
        config: configuration of the step; its batch size is replaced.

    Raises:
        UserError: a setting that cannot be walked.
    """
    require_folder(output)
    figures, console = Card.of(card), new_console()
    batch = ranks * images * config.engine.accumulation_steps
    config = changed(config, {"output": "/nowhere", "data": {"train": "/nowhere", "batch_size": batch}})
    found: dict[int, Walk] = {}
    with without_warnings(), console.status("starting") as status:
        for width in dict.fromkeys(widths or WIDTHS):
            status.update(f"width {width}")
            found[width] = walk(at_width(config, width), ranks, figures)
    title = f"Counted, not measured: a step of {config.recipe} on {ranks} x {figures.name}, {images} images each"
    headers = ("width", "ms", "objective, %", "its TFLOP", "collectives, GB", "GiB", "F, GiB")
    table = table_of_figures(*headers, title=title, title_justify="left")
    host = Host.expected()
    shares = {width: each.parts["objective"].seconds / each.of_card for width, each in found.items()}
    for width, each in found.items():
        table.add_row(
            f"{width}",
            f"{1e3 * each.seconds(host):.2f}",
            f"{100 * shares[width]:.1f}",
            f"{each.parts['objective'].flops / 1e12:.2f}",
            f"{sum(kind.bytes for kind in each.collectives.values()) / 1e9:.3f}",
            f"{sum(each.peak.values()) / 2**30:.2f}",
            f"{each.peak['correlation'] / 2**30:.2f}",
        )
    console.print(table)
    console.print(
        "ms are expected, one operator after the other, or the host's if it needs longer; GiB are peak memory",
        soft_wrap=True,
    )
    setting = {"recipe": config.recipe, "ranks": ranks, "images_per_rank": images, "counted_for": card}
    setting |= {"placement": getattr(config.objective, "placement", None), "zero_stage": config.engine.zero_stage}
    rows = [{**setting, "width": w, "objective_share": shares[w], **each.as_json()} for w, each in found.items()]
    console.print(f"rows appended to {append(output, 'dry_width', rows)}")
