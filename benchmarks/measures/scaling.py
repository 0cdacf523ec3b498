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

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from unigrad_fast.benchmarks.harness.memory import process_bytes
from unigrad_fast.benchmarks.harness.processes import in_processes, new_process, require_one_process, results
from unigrad_fast.benchmarks.harness.record import append, make_folder
from unigrad_fast.benchmarks.harness.run_config import SELDOM, changed, long_enough, with_images
from unigrad_fast.benchmarks.harness.turns import Turns, median_and_range, seconds, spread, take_turns
from unigrad_fast.benchmarks.measures.step_blocks import StepWorker
from unigrad_fast.config import Config
from unigrad_fast.dry_run.cards import Card
from unigrad_fast.dry_run.walked import Walk
from unigrad_fast.dry_run.walking import walk
from unigrad_fast.runtime.collectives import CollectiveSpy, Sum
from unigrad_fast.runtime.console import new_console, table_of_figures
from unigrad_fast.runtime.files import require_folder
from unigrad_fast.runtime.quiet import without_warnings
from unigrad_fast.runtime.wording import count

KINDS = ("gather", "exchange", "reduce")
SHARED = "ranks on one machine share its cores, so this shows how bytes and memory scale, not speed"


@dataclass(frozen=True)
class RankBlock:
    """A block of steps on a rank: seconds per step, peak bytes so far, collectives of one step."""

    seconds: float
    peak: int
    collectives: dict[str, Sum]


class RankWorker(StepWorker):
    """A rank of a run, in its own process.

    Args:
        launch: environment variables that a launcher would set.
    """

    def __init__(self, config: Config, launch: Mapping[str, str]):
        os.environ.update(launch)
        import unigrad_fast.training.trainer  # noqa: F401  # now, so that `before` includes its libraries

        self.before = process_bytes("VmRSS")
        super().__init__("ours", config)

    def block(self, warmup: int, steps: int) -> RankBlock:
        """Measures a block of steps, and counts the collectives of one more; all ranks call it together."""
        try:
            for _ in range(warmup):
                self.variant.step()
            each = seconds(self.variant.step, self.device, steps)
            with CollectiveSpy() as spy:
                self.variant.step()
        except BaseException:
            self.session.close()  # otherwise the others would wait for this rank
            raise
        held = 0 if self.device.type == "cuda" else self.before
        block = RankBlock(each, self.peak() - held, dict(spy.found))
        self.come_to_rest()
        return block


def placements(ranks: int) -> tuple[str, ...]:
    """The placements of F that differ; a single rank always holds all of F."""
    return ("replicated", "sharded") if ranks > 1 else ("replicated",)


def configure(config: Config, ranks: int, images: int, placement: str) -> Config:
    """The configuration with so many images per rank, and without reports, because only some steps make collectives
    for them.

    If there are fewer GPUs than ranks, all ranks use the CPU.
    """
    engine = {"threads": config.engine.threads or max(1, torch.get_num_threads() // ranks)}
    changes = {
        "output": None,
        "engine": engine | ({"device": "cpu"} if torch.cuda.device_count() < ranks else {}),
        "data": {"batch_size": ranks * images * config.engine.accumulation_steps},
        "objective": {"placement": placement},
        "telemetry": {"every": SELDOM, "tensorboard": False},
    }
    return changed(config, changes)


def measure(
    config: Config, ranks: int, images: int, turns: Turns, report: Callable[[str], object]
) -> dict[str, list[list[RankBlock]]]:
    """By placement of F, the blocks of each round, one per rank."""
    workers = {}
    for placement in placements(ranks):
        chosen = long_enough(configure(config, ranks, images, placement), turns.all_steps + turns.repetitions)
        port = _free_port()
        for rank in range(ranks):
            workers[placement, rank] = partial(RankWorker, chosen, _launch(rank, ranks, port))
    with in_processes(workers, new_process) as blocks, ThreadPoolExecutor(ranks) as threads:

        def together(placement: str) -> list[RankBlock]:
            each = [blocks[placement, rank] for rank in range(ranks)]
            return results([threads.submit(block, turns.warmup, turns.steps) for block in each])

        each = {placement: partial(together, placement) for placement in placements(ranks)}
        return take_turns(each, turns.repetitions, report=lambda what: report(f"{ranks} ranks, {what}"))


def _launch(rank: int, ranks: int, port: int) -> dict[str, str]:
    """The environment of a rank."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    return {"MASTER_ADDR": "127.0.0.1", **{name: str(number) for name, number in numbers.items()}}


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


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
