"""A training step by the width of its projector: time, memory, share of the objective; accuracy of short runs.

    unigrad-fast bench width [--widths 512,1024,2048] [--recipe NAME] [--data.train FOLDER] [--train true] [...]
    unigrad-fast bench width --dry_run true --recipe imagenet_100ep [--ranks 8] [--images 128] [--card h100|a100]

Each width's step is that of `pretrain`, in a process of its own, and they take turns: a block of steps each, round
after round. Peak memory is that of the width's process, on a GPU that of torch's allocator. The objective's share is
that of its phase in the step, by the run's own clock.

`--train true` then trains a run of each width as the configuration says, one after the other in OUTPUT/width-C, and
reports their kNN accuracy; a run that is there goes on, or is done. The objective's balance is the recipe's at every
width, as in the paper's table of widths.

The dry run counts, and measures nothing: see `unigrad_fast.dry_run`. There the objective's share is of the expected
time, without its collectives. Rows go to OUTPUT/width.jsonl, or OUTPUT/dry_width.jsonl.
"""

from __future__ import annotations

import json
import os
import statistics
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from unigrad_fast import planning
from unigrad_fast.benchmarks.harness import spread, take_turns
from unigrad_fast.benchmarks.memory import free_bytes
from unigrad_fast.benchmarks.processes import in_processes, new_process, require_one_process
from unigrad_fast.benchmarks.record import OUTPUT, append, make_folder, require_folder
from unigrad_fast.benchmarks.run_config import SELDOM, changed, long_enough, with_images
from unigrad_fast.benchmarks.step_measure import Block, StepWorker
from unigrad_fast.benchmarks.tables import median_and_range, table_of_figures
from unigrad_fast.config import Config
from unigrad_fast.dry_run import Card, Walk, walk
from unigrad_fast.networks.encoder import Encoder
from unigrad_fast.runtime.console import new_console
from unigrad_fast.runtime.errors import UserError
from unigrad_fast.runtime.wording import byte_size, count
from unigrad_fast.training.same_run import require_same_run

WIDTHS = (512, 1024, 2048, 4096, 8192)
LIBRARIES = 3 << 29  # bytes of a process
COPIES = 5  # weights, gradients, momentum, target and its bf16 copy, activations


def at_width(config: Config, width: int) -> Config:
    return changed(config, {"model": {"projector": {"width": width}}})


def needed_bytes(config: Config, width: int) -> int:
    """About what a width's process takes."""
    with torch.device("meta"):
        weights = sum(parameter.nbytes for parameter in Encoder(at_width(config, width).model).parameters())
    return LIBRARIES + COPIES * weights + 6 * width**2  # F and its copy


def that_fit(config: Config, widths: Sequence[int] | None, free: int) -> list[int]:
    """The widths, or those of the usual ones whose processes fit into free memory together.

    Raises:
        UserError: the widths do not fit.
    """
    fitting, total = [], 0
    for width in WIDTHS if widths is None else dict.fromkeys(widths):
        total += needed_bytes(config, width)
        if total <= free:
            fitting.append(width)
        elif widths is not None:
            given = ",".join(map(str, widths))
            raise UserError(
                f"widths = {given}: those up to {width} hold about {byte_size(total)} together, as they take turns, "
                f"and {byte_size(free)} are free; give fewer or smaller ones"
            )
    if not fitting:
        raise UserError(f"widths = null: {byte_size(free)} of free memory hold none of the usual ones; give --widths")
    return fitting


def measure(config: Config, widths: Sequence[int], rounds: int, steps: int, warmup: int, report) -> dict:
    """The blocks of every width, one per round; every step is reported, for its phases."""
    reports = {"every": 1, "effective_rank_every": SELDOM, "tensorboard": False}
    config = long_enough(changed(config, {"output": None, "telemetry": reports}), rounds * (warmup + steps))
    workers = {width: partial(StepWorker, "ours", at_width(config, width)) for width in widths}
    with in_processes(workers, new_process) as blocks:
        turns = {width: partial(block, warmup, steps) for width, block in blocks.items()}
        return take_turns(turns, rounds, report=lambda what: report(f"width {what}"))


def row_of(width: int, batch_size: int, blocks: Sequence[Block]) -> dict[str, Any]:
    phases = {key: statistics.median(block.phases[key] for block in blocks) for key in blocks[-1].phases}
    return {
        "what": f"width {width}",
        "width": width,
        "unit": "ms",
        **spread([1e3 * batch_size / block.images_per_s for block in blocks]),
        "peak_gib": blocks[-1].peak_gib,
        "objective_share": phases["ms_objective"] / sum(phases.values()),
        "phases": phases,
    }


def run_at(config: Config, width: int, output: Path) -> Config:
    return changed(at_width(config, width), {"output": output / f"width-{width}"})


def train(run: Config) -> float:
    """The kNN accuracy of a run once it is done, in per cent."""
    from unigrad_fast.training import loop  # here: while steps are measured this process is to stay small

    loop.pretrain(run)
    return json.loads((run.output / "summary.json").read_text(encoding="utf-8"))["knn_last"]


def show(console: Console, title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    table = table_of_figures(
        "ms of a step", "median", "least to most", "peak, GiB", "objective, %", "kNN, %", title=title
    )
    for row in rows:
        accuracy = f"{row['knn']:.2f}" if row["knn"] is not None else ""
        share = f"{100 * row['objective_share']:.1f}"
        table.add_row(row["what"], *median_and_range(row, digits=1), f"{row['peak_gib']:.2f}", share, accuracy)
    console.print(table)


def main(
    config: Config,
    widths: Sequence[int] | None = None,
    repetitions: int = 3,
    steps: int = 2,
    warmup: int = 1,
    train_runs: bool = False,
    output: Path = OUTPUT,
) -> None:
    """Measure, print the table and append the rows.

    Args:
        config: what is trained; images are drawn if it has none.
        widths: of the projector, else those of the usual ones that memory holds together.
        repetitions: rounds, in each of which every width has a block.
        steps, warmup: measured steps of a block, and those before them.
        train_runs: train a run of each width too.
        output: folder of the rows, of runs, and of images that are drawn.

    Raises:
        UserError: the environment says that this is one process of several; `output` is a file; widths too large for
            this machine; a run's folder that holds another one.
        DataError: the images cannot be used.
        Preempted: a signal ended a run, which goes on with the same command.
    """
    require_one_process("bench width")
    require_folder(output)
    chosen = that_fit(config, widths, free_bytes())
    make_folder(output)
    config, what = with_images(config, output)
    if train_runs:
        for width in chosen:
            require_same_run(run_at(config, width, output))
    console = new_console()
    with console.status("starting") as status:
        blocks = measure(config, chosen, repetitions, steps, warmup, status.update)
    rows = [{**row_of(width, config.data.batch_size, each), "knn": None} for width, each in blocks.items()]
    title = f"{config.model.backbone}, {config.data.image_size} px, batch {config.data.batch_size}, {what}"
    if train_runs:
        show(console, title, rows)
        for row in rows:
            row["knn"] = train(run_at(config, row["width"], output))
        title += f", {count(config.schedule.epochs, 'epoch')}"
    show(console, title, rows)
    setting = {
        "recipe": config.recipe,
        "backbone": config.model.backbone,
        "image_size": config.data.image_size,
        "batch_size": config.data.batch_size,
        "images": what,
        "epochs": config.schedule.epochs if train_runs else None,
        "repetitions": repetitions,
        "steps": steps,
        "warmup": warmup,
        "threads": len(os.sched_getaffinity(0)),
    }
    console.print(f"rows appended to {append(output, 'width', [{**setting, **row} for row in rows])}")


def dry_run(
    config: Config,
    widths: Sequence[int] | None = None,
    ranks: int = 8,
    images: int = 128,
    card: str = "h100",
    output: Path = OUTPUT,
) -> None:
    """Walk through a step of every width, print the table and append the rows.

    Args:
        config: what is trained, with this batch in place of its own.
        ranks: cards, with so many `images` each.
        card: a key of `cards.json`.

    Raises:
        UserError: a setting that is not walked.
    """
    require_folder(output)
    figures, console = Card.of(card), new_console()
    batch = ranks * images * config.engine.accumulation_steps
    config = changed(config, {"output": "/nowhere", "data": {"train": "/nowhere", "batch_size": batch}})
    found: dict[int, Walk] = {}
    with warnings.catch_warnings(), console.status("starting") as status:
        warnings.simplefilter("ignore")
        for width in dict.fromkeys(widths or planning.WIDTHS):
            status.update(f"width {width}")
            found[width] = walk(at_width(config, width), ranks, figures)
    title = f"Counted, not measured: a step of {config.recipe} on {ranks} x {figures.name}, {images} images each"
    headers = ("width", "ms", "objective, %", "its TFLOP", "collectives, GB", "GiB", "F, GiB")
    table = table_of_figures(*headers, title=title, title_justify="left")
    shares = {width: each.parts["objective"].seconds / each.seconds for width, each in found.items()}
    for width, each in found.items():
        table.add_row(
            f"{width}",
            f"{1e3 * each.seconds:.2f}",
            f"{100 * shares[width]:.1f}",
            f"{each.parts['objective'].flops / 1e12:.2f}",
            f"{sum(kind.bytes for kind in each.collectives.values()) / 1e9:.3f}",
            f"{sum(each.peak.values()) / 2**30:.2f}",
            f"{each.peak['correlation'] / 2**30:.2f}",
        )
    console.print(table)
    console.print("ms are expected, one operator after the other; GiB are those at the fullest moment", soft_wrap=True)
    setting = {"recipe": config.recipe, "ranks": ranks, "images_per_rank": images, "counted_for": card}
    setting |= {"placement": getattr(config.objective, "placement", None), "zero_stage": config.engine.zero_stage}
    rows = [{**setting, "width": w, "objective_share": shares[w], **each.as_json()} for w, each in found.items()]
    console.print(f"rows appended to {append(output, 'dry_width', rows)}")
