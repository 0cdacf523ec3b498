"""Bytes, memory and time of a training step on 1 to 4 ranks of this machine, with F replicated and sharded.

    unigrad-fast bench scaling [--ranks 1,2,3,4] [--images 16] [--recipe NAME] [--model.projector.width C] [...]

Every rank is a process, with the same number of images however many ranks there are. Both placements of F take turns,
one block of steps each per round. A spy counts the collectives of one real step per block; they are shown next to those
that the dry run counts for the same configuration without starting ranks (`unigrad_fast.dry_run`). The bytes of a
collective are those of its largest operand on rank 0. Because ranks on one machine share its cores, this shows how
bytes and memory scale, not speed. Without a GPU per rank they use the CPU and gloo.

Memory is the peak of a rank's process beyond what its libraries take or, on GPUs, of torch's allocator; of all ranks,
the largest is shown. Rows are appended to OUTPUT/scaling.jsonl.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from unigrad_fast.benchmarks.harness.processes import require_one_process
from unigrad_fast.benchmarks.harness.record import append, make_folder
from unigrad_fast.benchmarks.harness.run_config import with_images
from unigrad_fast.benchmarks.harness.turns import Turns, median_and_range, spread
from unigrad_fast.benchmarks.measures.scaling_blocks import RankBlock, configure, measure, placements
from unigrad_fast.config import Config
from unigrad_fast.dry_run.cards import Card
from unigrad_fast.dry_run.walked import Walk
from unigrad_fast.dry_run.walking import walk
from unigrad_fast.runtime.console import new_console
from unigrad_fast.runtime.links import require_folder
from unigrad_fast.runtime.quiet import without_warnings
from unigrad_fast.runtime.tables import table_of_figures
from unigrad_fast.runtime.wording import count

KINDS = ("gather", "exchange", "reduce")
SHARED = "ranks on one machine share its cores, so this shows how bytes and memory scale, not speed"


def row_of(ranks: int, placement: str, blocks: Sequence[Sequence[RankBlock]], walked: Walk) -> dict[str, Any]:
    """The row of a number of ranks and a placement of F, with measured and counted figures.

    Args:
        blocks: for each round, the blocks of all ranks.
        walked: the counts of the dry run.
    """
    return {
        "what": f"{count(ranks, 'rank')}, {placement}",
        "ranks": ranks,
        "placement": placement,
        "unit": "ms",
        **spread([1e3 * max(block.seconds for block in each) for each in blocks]),
        "peak_gib": max(block.peak for block in blocks[-1]) / 2**30,
        "counted_gib": sum(walked.peak.values()) / 2**30,
        "collectives": {kind: asdict(each) for kind, each in blocks[-1][0].collectives.items()},
        "counted": {
            kind: {"count": each.count, "bytes": each.bytes} for kind, each in walked.collectives.items() if each.count
        },
    }


def show(console: Console, title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    console.print(title, soft_wrap=True)
    table = table_of_figures("", "ms of a step", "least to most", "GiB of a rank", "counted")
    for row in rows:
        memory = (f"{row['peak_gib']:.3f}", f"{row['counted_gib']:.3f}")
        table.add_row(row["what"], *median_and_range(row, digits=1), *memory)
    console.print(table)
    console.print(SHARED, soft_wrap=True)
    table = table_of_figures("MB in collectives of a step", *KINDS, "counted are")
    for row in rows:
        sizes = (row["collectives"].get(kind, {"bytes": 0})["bytes"] / 1e6 for kind in KINDS)
        table.add_row(row["what"], *(f"{size:,.3f}" for size in sizes), "the same" if agrees(row) else "others")
    console.print(table)
    for row in rows:
        if not agrees(row):
            said = f"{row['what']}: the real step made {row['collectives']}, the dry run counts {row['counted']}"
            console.print(said, soft_wrap=True)


def agrees(row: Mapping[str, Any]) -> bool:
    """Whether the real step made the collectives that the dry run counts, in number and bytes."""
    return row["collectives"] == row["counted"]


def main(config: Config, ranks: Sequence[int], images: int, turns: Turns, output: Path) -> None:
    """Measure, print the table and append the rows, with the options of `unigrad-fast bench scaling`.

    Args:
        config: configuration to train with; its batch and placement of F are replaced, and images drawn if it has none.

    Raises:
        UserError: the environment says that this is one of several processes; `output` is a file; the dry run cannot
            walk a setting; there are more ranks than rows of F.
        DataError: the images cannot be used.
    """
    require_one_process("bench scaling")
    require_folder(output)
    ranks = list(dict.fromkeys(ranks))
    walked = {(number, each): _walk(config, number, images, each) for number in ranks for each in placements(number)}
    make_folder(output)
    config, what = with_images(config, output)
    console = new_console()
    rows = []
    for number in ranks:
        with console.status("starting") as status:
            found = measure(config, number, images, turns, status.update)
        rows += [row_of(number, each, blocks, walked[number, each]) for each, blocks in found.items()]
    width = config.model.projector.width
    title = f"{config.model.backbone}, projector of {width}, {count(images, 'image')} on each rank, {what}"
    show(console, title, rows)
    setting = {
        "recipe": config.recipe,
        "backbone": config.model.backbone,
        "image_size": config.data.image_size,
        "width": width,
        "images_per_rank": images,
        "zero_stage": config.engine.zero_stage,
        **turns.as_row(),
    }
    console.print(f"rows appended to {append(output, 'scaling', [{**setting, **row} for row in rows])}")


def _walk(config: Config, ranks: int, images: int, placement: str) -> Walk:
    """The dry run's counts of the same step, on the code paths that it takes on this machine."""
    with without_warnings():
        chosen = configure(config, ranks, images, placement)
        return walk(chosen, ranks, Card.of("h100"), as_cuda=torch.cuda.device_count() >= ranks)
