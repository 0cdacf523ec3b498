"""Prints the findings as tables."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from unigrad_fast.doctor.finding import Finding
from unigrad_fast.doctor.machine import gib
from unigrad_fast.doctor.scene import IMAGES_PER_RANK
from unigrad_fast.runtime.console import fitted

if TYPE_CHECKING:
    from unigrad_fast.runtime.process_group import World

STYLES = {"ok": "green", "note": "yellow", "skipped": "yellow"}


def _status(finding: Finding) -> Text:
    return Text(finding.status, style=STYLES.get(finding.status, "bold red"))


def _text(finding: Finding) -> Text:
    return Text(fitted("\n".join(filter(None, [finding.found, finding.remedy and f"→ {finding.remedy}"]))))


def of_findings(title: str, found: Sequence[Finding]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False)
    for each in found:
        table.add_row(each.name, _text(each), _status(each))
    return table


def of_parts(found: Sequence[Finding], world: World) -> Table:
    memory = f"{gib(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 1024)} of the process"
    if world.device.type == "cuda":
        import torch

        memory += f", {gib(torch.cuda.max_memory_allocated(world.device))} of the GPU"
    table = Table(
        title=f"Each part tried, with {IMAGES_PER_RANK} images per rank",
        title_justify="left",
        caption=f"Peak memory: {memory}",
        caption_justify="left",
    )
    table.add_column("part")
    table.add_column("first, ms", justify="right")
    table.add_column("again, ms", justify="right")
    table.add_column("result")
    for each in found:
        times = [f"{value:,.1f}" for value in each.times] or ["", ""]
        table.add_row(each.name, *times, Text("\n").join([_status(each), *([_text(each)] if each.found else [])]))
    return table
