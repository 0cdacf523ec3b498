"""Images per second and processor time of decoding and augmentation, against torchvision and against only decoding.

    unigrad-fast bench loader [--photographs FOLDER] [--preset simsiam] [--device gpu] [--output FOLDER]

    ours                     `Loader` as shipped, with as many threads as there are cores
    torchvision v1           `transforms` on Pillow images, as in SimSiam's published code
    torchvision v2, Pillow   `transforms.v2` on Pillow images
    torchvision v2, tensors  `transforms.v2` on uint8 tensors that torchvision decoded
    DALI, decoding alone     with the same threads and device as ours
    Pillow, decoding alone   in the same processes as torchvision

torchvision and Pillow run in a DataLoader with as many worker processes as there are cores. All variants decode a file
once per image and use the parameters of the same preset. torchvision uses its cheapest operations: Pillow images are
blurred by Pillow, tensors with the narrowest window that covers three standard deviations.

Each variant runs in its own process, and they take turns: one block of batches each per round. A process is idle, with
full queues, before and after its block, so the processor time in between (including its worker processes) belongs to
exactly the images taken. The wall clock starts when the batches already in the queues are used up. Memory is measured
in a fresh process of ours, after each epoch over a small manifest in small batches: DALI's buffers grow to the largest
image seen at each position in a batch, which takes long with large batches and would look like a leak.

With `--source`, sources of images are compared instead, in `loader_sources.py`.

The images are files in a temporary folder, in the page cache before measuring starts. Rows are appended to
OUTPUT/loader.jsonl.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from rich.box import SIMPLE
from rich.console import Console

from unigrad_fast.benchmarks.harness.images import ENTRIES, find_images, link_images, spread_evenly
from unigrad_fast.benchmarks.harness.record import append, make_folder
from unigrad_fast.benchmarks.harness.turns import median_and_range, ratio_row, spread
from unigrad_fast.benchmarks.measures import loader_sources
from unigrad_fast.benchmarks.measures.loader_blocks import Block, measure, measure_memory
from unigrad_fast.benchmarks.peers.loader import DALI, OURS, PILLOW, QUEUE, TORCHVISION, Setting
from unigrad_fast.pipelines import preset_views
from unigrad_fast.runtime.console import new_console, table_of_figures
from unigrad_fast.runtime.errors import UserError

PRESETS = ("simsiam", "multicrop")  # measured by default
SMALL_ENTRIES, SMALL_BATCH = 256, 8  # images per epoch and per batch when memory is measured


def rows_of(blocks: dict[str, list[Block]], views: int) -> list[dict]:
    """A row per variant and per ratio: median, least and most over the rounds."""
    rows = []
    for what, measured in blocks.items():
        speed = spread([block.images_per_s for block in measured])
        made = 0 if what in (DALI, PILLOW) else views
        cpu = {f"cpu_ms_{key}": value for key, value in spread([block.cpu_ms for block in measured]).items()}
        rows.append({"what": what, "unit": "images/s", **speed, "views_per_s": made * speed["median"], **cpu})

    speeds = {what: [block.images_per_s for block in measured] for what, measured in blocks.items()}
    best = max(TORCHVISION, key=lambda what: statistics.median(speeds[what]))
    for other in TORCHVISION:
        mark = ", its best" if other == best else ""
        rows.append(ratio_row(f"images/s, ours / {other}{mark}", speeds[OURS], speeds[other]))
    cpu_ms = ([block.cpu_ms for block in blocks[what]] for what in (best, OURS))
    rows.append(ratio_row(f"processor time, {best} / ours", *cpu_ms))
    rows.append(ratio_row(f"images/s, ours / {DALI}", speeds[OURS], speeds[DALI]))
    return rows


def memory_row(resident: list[float]) -> dict:
    """Memory after each epoch, and the slope of a line fitted to it, MiB per epoch."""
    slope = float(np.polyfit(np.arange(len(resident)), resident, 1)[0])
    return {"what": "ours, memory", "unit": "MiB", **spread(resident), "after_epochs": resident, "slope": slope}


def show(console: Console, title: str, rows: list[dict], memory: dict) -> None:
    headers = ("", "images/s", "range", "views/s", "CPU ms", "range")
    table = table_of_figures(*headers, title=title, box=SIMPLE, pad_edge=False, collapse_padding=True)
    ratios = table_of_figures("ratio, round by round", "median", "range", box=SIMPLE, pad_edge=False)
    for row in rows:
        if row["unit"] == "ratio":
            ratios.add_row(row["what"], *median_and_range(row, digits=2))
            continue
        views = f"{row['views_per_s']:,.0f}" if row["views_per_s"] else ""
        cpu = median_and_range(row, digits=1, prefix="cpu_ms_")
        table.add_row(row["what"], *median_and_range(row, digits=0), views, *cpu)
    console.print(table, ratios)
    after = ", ".join(f"{mib:.0f}" for mib in memory["after_epochs"])
    console.print(f"memory of ours after each epoch, MiB: {after}; slope {memory['slope']:+.2f} MiB per epoch")


def require_shared_memory(setting: Setting) -> None:
    """Raises UserError if the batches in torchvision's queues would not fit in shared memory."""
    batch = setting.batch_size * sum(4 * 3 * view.size**2 for view in setting.views)
    needed = len(TORCHVISION) * (QUEUE * setting.threads + 1) * batch
    free = shutil.disk_usage("/dev/shm").free
    if needed > free:
        raise UserError(
            f"torchvision's worker processes need {needed / 2**30:.1f} GiB of shared memory, but /dev/shm has "
            f"{free / 2**30:.1f}; use a smaller batch_size than {setting.batch_size}, fewer threads than "
            f"{setting.threads}, or give the container more (docker run --shm-size)"
        )


def main(
    photographs: Path | None,
    preset: str | None,
    device: str,
    batch_size: int,
    image_size: int | None,
    threads: int | None,
    rounds: int,
    steps: int,
    epochs: int,
    source: tuple[str, ...] | None,
    output: Path,
) -> None:
    """Measure, print the tables and append the rows, with the options of `unigrad-fast bench loader`.

    Raises:
        UserError: no GPU is found, or shared memory is too small; `output` is a file.
        DataError: the images or the preset cannot be used.
    """
    if device == "gpu" and not torch.cuda.is_available():
        raise UserError("device = gpu: torch finds no GPU; use --device cpu")
    presets = {name: preset_views(name, image_size) for name in ([preset] if preset else PRESETS)}
    threads = threads or len(os.sched_getaffinity(0))
    steps = -(-steps // threads) * threads
    if source:
        chosen = preset or PRESETS[0]
        options = (photographs, chosen, device, batch_size, image_size, threads, rounds, steps, output, versions)
        loader_sources.main(source, *options)
        return
    make_folder(output)
    console = new_console()
    if photographs is None:
        console.print("the images are drawn and unlike photographs; give --photographs for meaningful figures")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths, what = find_images(photographs, folder / "found")
        entries = max(batch_size, ENTRIES)
        linked, few = (
            link_images((paths[number] for number in spread_evenly(len(paths), count)), folder / name)
            for name, count in (("images", entries), ("few", SMALL_ENTRIES))
        )
        for preset, views in presets.items():
            setting = Setting(views, linked, folder / "cache", batch_size, threads, device)
            require_shared_memory(setting)
            with console.status(preset) as status:
                blocks = measure(setting, rounds, steps, lambda now, name=preset: status.update(f"{name}, {now}"))
                status.update(f"{preset}, memory")
                small = replace(setting, images=few, batch_size=SMALL_BATCH)
                memory = memory_row(measure_memory(small, epochs))
            rows = rows_of(blocks, len(views))
            sizes = " + ".join(
                f"{sum(view.size == size for view in views)}x{size}" for size in dict.fromkeys(v.size for v in views)
            )
            where = "" if device == "cpu" else ", ours on the GPU"
            show(console, f"{preset}, {sizes} px, batch {batch_size}, {threads} threads{where}, {what}", rows, memory)
            common = {
                "recipe": preset,
                "views": sizes,
                "batch_size": batch_size,
                "images": what,
                "entries": entries,
                "device": device,
                "threads": threads,
                "rounds": rounds,
                "steps": steps,
                **versions(),
            }
            path = append(output, "loader", [{**common, **row} for row in (*rows, memory)])
    console.print(f"images/s and views/s by the wall clock, CPU ms per image; rows appended to {path}")


def versions() -> dict[str, str]:
    found = {item.metadata["Name"]: item.version for item in importlib.metadata.distributions()}
    dali = next(version for name, version in found.items() if name and name.startswith("nvidia-dali"))
    return {"dali": dali, "torchvision": found["torchvision"], "pillow": found["pillow"]}
