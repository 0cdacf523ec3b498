"""A training step at several projector widths: time, memory, the objective's share; accuracy of short runs.

    unigrad-fast bench width [--widths 512,1024,2048] [--recipe NAME] [--data.train FOLDER] [--train true] [...]

The step of each width is that of `pretrain` and runs in its own process; widths take turns, one block of steps each per
round. Peak memory is that of the width's process or, on a GPU, of torch's allocator. The objective's share is its
phase's share of the step, by the run's own clock.

`--train true` then trains one run per width with the given configuration, one after the other in OUTPUT/width-C, and
reports their kNN accuracy; an existing run is resumed, or kept if it is complete. The objective's balance is the
recipe's at every width, as in the paper's table of widths.

Rows are appended to OUTPUT/width.jsonl.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from unigrad_fast.benchmarks.harness.memory import free_bytes
from unigrad_fast.benchmarks.harness.processes import in_processes, new_process, require_one_process
from unigrad_fast.benchmarks.harness.record import append, make_folder
from unigrad_fast.benchmarks.harness.run_config import SELDOM, at_width, changed, long_enough, with_images
from unigrad_fast.benchmarks.harness.turns import Turns, median_and_range, spread, take_turns
from unigrad_fast.benchmarks.measures.step_blocks import Block, StepWorker
from unigrad_fast.config import Config
from unigrad_fast.networks.encoder import Encoder
from unigrad_fast.runtime.console import new_console, table_of_figures
from unigrad_fast.runtime.errors import UserError
from unigrad_fast.runtime.files import require_folder
from unigrad_fast.runtime.run_folder import RunFolder
from unigrad_fast.runtime.wording import byte_size, count
from unigrad_fast.training.same_run import require_same_run

WIDTHS = (512, 1024, 2048, 4096, 8192)
LIBRARIES = 3 << 29  # bytes per process
COPIES = 5  # weights, gradients, momentum, target and its bf16 copy, activations


def needed_bytes(config: Config, width: int) -> int:
    """Approximate memory of a width's process."""
    with torch.device("meta"):
        weights = sum(parameter.nbytes for parameter in Encoder(at_width(config, width).model).parameters())
    return LIBRARIES + COPIES * weights + 6 * width**2  # F and its copy


def that_fit(config: Config, widths: Sequence[int] | None, free: int) -> list[int]:
    """The given widths, or the default widths whose processes fit in free memory together.

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
                f"widths = {given}: the processes up to width {width}, which run side by side, need about "
                f"{byte_size(total)}, but {byte_size(free)} are free; give fewer or smaller widths"
            )
    if not fitting:
        raise UserError(f"widths = null: no default width fits in {byte_size(free)} of free memory; give --widths")
    return fitting


def measure(config: Config, widths: Sequence[int], turns: Turns, report) -> dict:
    """The blocks of every width, one per round; every step reports metrics, for its phases."""
    reports = {"every": 1, "effective_rank_every": SELDOM, "tensorboard": False}
    engine = {"threads": torch.get_num_threads()}
    config = long_enough(changed(config, {"output": None, "engine": engine, "telemetry": reports}), turns.all_steps)
    workers = {width: partial(StepWorker, "ours", at_width(config, width)) for width in widths}
    with in_processes(workers, new_process) as blocks:
        each = {width: partial(block, turns.warmup, turns.steps) for width, block in blocks.items()}
        return take_turns(each, turns.repetitions, report=lambda what: report(f"width {what}"))


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
    """Train a run, and return its kNN accuracy in percent."""
    from unigrad_fast.training import loop  # here, so that this process stays small while steps are measured

    loop.pretrain(run)
    return json.loads(RunFolder(run.output).summary.read_text(encoding="utf-8"))["knn_last"]


def show(console: Console, title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    table = table_of_figures(
        "ms of a step", "median", "least to most", "peak, GiB", "objective, %", "kNN, %", title=title
    )
    for row in rows:
        accuracy = f"{row['knn']:.2f}" if row["knn"] is not None else ""
        share = f"{100 * row['objective_share']:.1f}"
        table.add_row(row["what"], *median_and_range(row, digits=1), f"{row['peak_gib']:.2f}", share, accuracy)
    console.print(table)


def main(config: Config, widths: Sequence[int] | None, turns: Turns, train_runs: bool, output: Path) -> None:
    """Measure, print the table and append the rows, with the options of `unigrad-fast bench width`.

    Args:
        config: configuration to train with; images are drawn if it has none.

    Raises:
        UserError: the environment says that this is one of several processes; `output` is a file; the widths are too
            large for this machine; a run's folder holds another run.
        DataError: the images cannot be used.
        Preempted: a signal ended a run; the same command resumes it.
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
        blocks = measure(config, chosen, turns, status.update)
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
        **turns.as_row(),
    }
    console.print(f"rows appended to {append(output, 'width', [{**setting, **row} for row in rows])}")
