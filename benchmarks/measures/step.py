"""Images per second and peak memory of a training step, against a plain loop in the authors' formulation.

    unigrad-fast bench step [--case resnet50|resnet18|all] [--precision fp16] [--photographs FOLDER] [--output FOLDER]

    authors   images decoded and augmented by Pillow and torchvision in 2 worker processes, contiguous memory, the
              objective in whole-matrix torch expressions, torch's SGD and, in fp16, its GradScaler, a target update
              parameter by parameter
    ours      a step of `pretrain` as shipped: DALI, channels-last memory, our objective, DeepSpeed, all reports
    ceiling   only our networks, on images in memory: target forward, online forward, backward of a sum
    beside    with `--neighbour true`: ours while another program keeps a core busy, with the compute threads that a run
              chooses there, and with as many as alone

All start from the same weights and read the same images. Each variant runs in its own process, and they take turns:
one block of steps each per round, where each block starts with unmeasured steps. After its block a process may still
fill its queues of images; the next one starts when it is idle. If data is slower than the networks, set `--warmup` to
at least the batches that the queues hold (4); otherwise a block profits from batches prepared before it.

Peak memory is that of the variant's process (without the authors' worker processes) or, on a GPU, of torch's allocator
(without DALI's). Rows are appended to OUTPUT/step.jsonl.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

import torch
from rich.console import Console

from unigrad_fast.benchmarks.harness.images import link_images, source, spread_evenly
from unigrad_fast.benchmarks.harness.processes import require_one_process
from unigrad_fast.benchmarks.harness.record import append, make_folder
from unigrad_fast.benchmarks.harness.turns import Turns, median_and_range, ratio_row, spread
from unigrad_fast.benchmarks.measures.step_blocks import Block, Case, Subject, fitting_beside, measure, subjects
from unigrad_fast.pipelines import Manifest
from unigrad_fast.runtime.console import new_console, table_of_figures
from unigrad_fast.runtime.precision import autocast_dtype

LEAST_BATCHES = 4  # per epoch
PRECISIONS = {None: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
CASES = {"resnet50": Case("resnet50", 224, 16), "resnet18": Case("resnet18", 96, 64)}


def rows_of(blocks: dict[Subject, list[Block]], shipped: str) -> list[dict]:
    """A row per variant (images/s) and per ratio: median, least and most over the rounds.

    Args:
        blocks: blocks of every variant, one per round.
        shipped: the precision that ours chooses by default.
    """
    rows = []
    for subject, measured in blocks.items():
        phases = {key: statistics.median(block.phases[key] for block in measured) for key in measured[-1].phases}
        speed = spread([block.images_per_s for block in measured])
        peak = measured[-1].peak_gib
        threads = {"threads": subject.threads_beside} if subject.threads_beside else {}
        rows.append({"what": str(subject), "unit": "images/s", **threads, **speed, "peak_gib": peak, "phases": phases})
    ratios = {f"ours as shipped ({shipped}) / authors, fp32": (("ours", shipped), ("authors", "fp32"))}
    precisions = dict.fromkeys(subject.precision for subject in blocks)
    for other in ("authors", "ceiling"):
        ratios |= {f"ours / {other}, {each}": (("ours", each), (other, each)) for each in reversed(precisions)}
    ratios |= {f"alone / {each}": (each[:2], each) for each in blocks if each.threads_beside}
    for name, pair in ratios.items():
        rows.append(ratio_row(name, *([block.images_per_s for block in blocks[Subject(*each)]] for each in pair)))
    return rows


def show(console: Console, title: str, rows: list[dict]) -> None:
    table = table_of_figures("images/s", "median", "least to most", "peak, GiB", title=title)
    for row in rows:
        peak = f"{row['peak_gib']:.2f}" if "peak_gib" in row else ""
        table.add_row(row["what"], *median_and_range(row, digits=2 if row["unit"] == "ratio" else 1), peak)
        table.rows[-1].end_section = row["unit"] != "ratio" and rows[rows.index(row) + 1]["unit"] == "ratio"
    console.print(table)
    for row in rows:
        if row.get("phases"):
            parts = (f"{key.removeprefix('ms_')} {value:.0f}" for key, value in row["phases"].items())
            console.print(f"{row['what']}, ms of a step: {', '.join(parts)}")


def link_tree(found: Manifest, folder: Path, count: int) -> Path:
    """An ImageFolder tree of `count` links to images: a subset spread evenly, or all of them repeatedly."""
    link_images((Path(found.path(number)) for number in spread_evenly(len(found), count)), folder / "images")
    return folder


def main(
    case: str,
    photographs: Path | None,
    batch_size: int | None,
    image_size: int | None,
    precision: str,
    turns: Turns,
    output: Path,
    neighbour: bool = False,
) -> None:
    """Measure, print the table and append the rows, with the options of `unigrad-fast bench step`.

    Raises:
        UserError: the environment says that this is one of several processes; `output` is a file.
        DataError: the images cannot be used.
    """
    require_one_process("bench step")
    make_folder(output)
    console = new_console()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shipped = PRECISIONS[autocast_dtype("auto", device)]
    numbers = dict.fromkeys((fitting_beside(), torch.get_num_threads())) if neighbour else ()
    measured = subjects(tuple(dict.fromkeys(("fp32", shipped, precision))))
    measured += [Subject("ours", shipped, threads) for threads in numbers]
    with tempfile.TemporaryDirectory() as folder:
        images, what = source(photographs, Path(folder))
        found = Manifest.open(images)
        what = f"{len(found):,} {what}"
        for name in CASES if case == "all" else [case]:
            chosen = CASES[name]
            batch = batch_size or chosen.batch_size
            chosen = Case(chosen.backbone, image_size or chosen.image_size, batch)
            needed = batch * max(LEAST_BATCHES, turns.all_steps)
            count = max(LEAST_BATCHES * batch, min(needed, len(found)))
            linked = link_tree(found, Path(folder, name), count)
            with console.status("starting") as status:
                blocks = measure(chosen, linked, turns, status.update, measured)
            rows = rows_of(blocks, shipped)
            title = f"{chosen.backbone}, {chosen.image_size} px, batch {batch}, {what}"
            show(console, title, rows)
            setting = {
                "backbone": chosen.backbone,
                "image_size": chosen.image_size,
                "batch_size": batch,
                "images": what,
                **turns.as_row(),
            }
            path = append(output, "step", [{**setting, **row} for row in rows])
    console.print(f"rows appended to {path}")
