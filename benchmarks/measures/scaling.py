"""Bytes, memory and time of a training step on 1 to 4 ranks of this machine, F on every rank and in shards.

    unigrad-fast bench scaling [--ranks 1,2,3,4] [--images 16] [--recipe NAME] [--model.projector.width C] [...]

Every rank is a process, and has as many images whatever the ranks are. Both placements of F take turns: a block of
steps each, round after round. The collectives of a step are counted by a spy in the real step, once per block, and
beside them stands what the dry run counts for the same configuration without any rank (`unigrad_fast.dry_run`): bytes
of a kind are those of its largest operand on rank 0. Ranks on one machine share its cores: what scales here is bytes
and memory, not speed. Without a GPU for each rank they compute on the CPU and talk through gloo.

Memory is that of the rank's process at its peak beyond what its libraries take, of the rank with most, on GPUs that of
torch's allocator. Rows go to OUTPUT/scaling.jsonl.
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
from unigrad_fast.dry_run import Card, Walk, walk
from unigrad_fast.runtime.console import new_console
from unigrad_fast.runtime.links import require_folder
from unigrad_fast.runtime.quiet import without_warnings
from unigrad_fast.runtime.tables import table_of_figures
from unigrad_fast.runtime.wording import count

KINDS = ("gather", "exchange", "reduce")
SHARED = "ranks on one machine share its cores: what scales here is bytes and memory, not speed"


def row_of(ranks: int, placement: str, blocks: Sequence[Sequence[RankBlock]], walked: Walk) -> dict[str, Any]:
    """What was measured and counted of a number of ranks with F in a placement.

    Args:
        blocks: of every round, those of all ranks.
        walked: what the dry run counts.
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
            said = f"{row['what']}: the spy found {row['collectives']}, the dry run counts {row['counted']}"
            console.print(said, soft_wrap=True)


def agrees(row: Mapping[str, Any]) -> bool:
    """Whether the spy found the collectives that the dry run counts, in number and bytes."""
    return row["collectives"] == row["counted"]


def main(config: Config, ranks: Sequence[int], images: int, turns: Turns, output: Path) -> None:
    """Measure, print the table and append the rows, with the options of `unigrad-fast bench scaling`.

    Args:
        config: what is trained; its batch and placement of F are set here, and images drawn if it has none.

    Raises:
        UserError: the environment says that this is one process of several; `output` is a file; a setting that the
            dry run does not walk; more ranks than rows of F.
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
    """What the dry run counts of the same step, on the branches that it takes here."""
    with without_warnings():
        chosen = configure(config, ranks, images, placement)
        return walk(chosen, ranks, Card.of("h100"), as_cuda=torch.cuda.device_count() >= ranks)
