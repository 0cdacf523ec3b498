"""Images per second from other sources of images, against files.

    unigrad-fast bench loader --source files,hf,parquet,dataset,pixels [--photographs FOLDER] [--output FOLDER]

    files     image files
    hf        the same bytes in Arrow files, as Hugging Face's `datasets` saves them
    parquet   the same bytes in an uncompressed Parquet file, which is read in place
    dataset   a Dataset that opens the files with Pillow, as torchvision's ImageFolder does; decoded in its threads
    pixels    a Dataset of decoded images in memory, as uint8 arrays

Each source gives the same images to `Loader`, in a process of its own, and they take turns as in `loader.py`. Then the
bytes alone are read, in one thread and a random order: microseconds per image, of `files`, `hf`, `parquet` by
`Manifest.read`, and of `dataset` and `pixels` by `dataset[i]` and its conversion. What is compressed is copied into the
cache at the first start and then read like `hf`. Rows are appended to OUTPUT/loader.jsonl.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from rich.box import SIMPLE

from unigrad_fast.benchmarks.harness.images import ENTRIES, find_images, link_images, spread_evenly
from unigrad_fast.benchmarks.harness.record import append, make_folder
from unigrad_fast.benchmarks.harness.turns import median_and_range, ratio_row, seconds, spread, take_turns
from unigrad_fast.benchmarks.measures.loader_blocks import measure
from unigrad_fast.benchmarks.peers.loader import Batches, Setting, ours, read_image
from unigrad_fast.pipelines import Manifest, preset_views
from unigrad_fast.pipelines.tables.listing import require_pyarrow
from unigrad_fast.runtime.console import new_console, table_of_figures

FILES, ARROW, PARQUET, DATASET, PIXELS = "files", "hf", "parquet", "dataset", "pixels"
SOURCES = (FILES, ARROW, PARQUET, DATASET, PIXELS)
DIFFERENT = 256  # images at most that `pixels` holds
READS = 400  # images of a turn in which bytes alone are read


class Opened:
    """A Dataset of Pillow's images, read when they are asked for."""

    def __init__(self, folder: Path):
        self.paths = sorted(folder.iterdir())

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, place: int) -> Image.Image:
        return read_image(self.paths[place].read_bytes())


class Decoded:
    """A Dataset of arrays in memory; a few different ones, repeated."""

    def __init__(self, folder: Path):
        paths = sorted(folder.iterdir())
        self.count = len(paths)
        self.arrays = [np.asarray(read_image(path.read_bytes())) for path in paths[:DIFFERENT]]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, place: int) -> np.ndarray:
        return self.arrays[place % len(self.arrays)]


def source_of(kind: str, files: Path, tables: Path) -> Any:
    """What `Manifest.open` takes."""
    return {
        FILES: lambda: files,
        ARROW: lambda: f"hf:{tables / ARROW}",
        PARQUET: lambda: tables / "all.parquet",
        DATASET: lambda: Opened(files),
        PIXELS: lambda: Decoded(files),
    }[kind]()


def batches(kind: str, tables: Path, setting: Setting) -> Batches:
    return ours(replace(setting, images=source_of(kind, setting.images, tables)))


def write_tables(files: Path, tables: Path) -> None:
    """The bytes of the files as Arrow, in the layout of `datasets`, and as Parquet without compression."""
    require_pyarrow("source = hf, parquet")
    import pyarrow
    from pyarrow import parquet

    (tables / ARROW).mkdir(parents=True)
    kind = pyarrow.struct({"bytes": pyarrow.binary(), "path": pyarrow.string()})
    schema, paths = pyarrow.schema({"image": kind}), sorted(files.iterdir())
    name = "data-00000-of-00001.arrow"
    (tables / ARROW / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    with (
        pyarrow.OSFile(os.fspath(tables / ARROW / name), "wb") as file,
        pyarrow.ipc.new_stream(file, schema) as arrow,
        parquet.ParquetWriter(tables / "all.parquet", schema, compression="none", use_dictionary=False) as other,
    ):
        for start in range(0, len(paths), 100):
            content = [{"bytes": path.read_bytes(), "path": path.name} for path in paths[start : start + 100]]
            rows = pyarrow.record_batch([pyarrow.array(content, kind)], schema=schema)
            arrow.write_batch(rows)
            other.write_batch(rows)


def reading(manifest: Manifest) -> float:
    """Microseconds per image for its bytes alone, in a random order."""
    order = np.random.default_rng(0).integers(0, len(manifest), READS).tolist()
    return 1e6 * seconds(lambda: [manifest.read(image) for image in order], torch.device("cpu")) / READS


def rows_of(speeds: dict[str, list[float]], reads: dict[str, list[float]]) -> list[dict]:
    """A row per source and measurement, and their ratios to files."""
    rows = [{"what": what, "unit": "images/s", **spread(found)} for what, found in speeds.items()]
    rows += [{"what": f"{what}, bytes alone", "unit": "us/image", **spread(found)} for what, found in reads.items()]
    for what in [kind for kind in speeds if kind != FILES and FILES in speeds]:
        rows.append(ratio_row(f"images/s, {what} / {FILES}", speeds[what], speeds[FILES]))
        rows.append(ratio_row(f"bytes alone, time of {FILES} / {what}", reads[FILES], reads[what]))
    return rows


def main(
    source: Sequence[str],
    photographs: Path | None,
    preset: str,
    device: str,
    batch_size: int,
    image_size: int | None,
    threads: int,
    rounds: int,
    steps: int,
    output: Path,
    common: Callable[[], dict[str, Any]],
) -> None:
    """Measure, print the table and append the rows; arguments as in `loader.main`, `common` has the versions."""
    views = preset_views(preset, image_size)
    make_folder(output)
    console = new_console()
    with tempfile.TemporaryDirectory() as name, console.status(preset) as status:
        folder = Path(name)
        paths, what = find_images(photographs, folder / "found")
        entries = max(batch_size, ENTRIES)
        files = link_images((paths[number] for number in spread_evenly(len(paths), entries)), folder / "images")
        tables = folder / "tables"
        if {ARROW, PARQUET} & {*source}:
            write_tables(files, tables)
        setting = Setting(views, files, folder / "cache", batch_size, threads, device)
        variants = {kind: partial(batches, kind, tables) for kind in source}
        blocks = measure(setting, rounds, steps, status.update, variants)
        opened = {kind: Manifest.open(source_of(kind, files, tables), folder / "cache") for kind in source}
        reads = take_turns({kind: partial(reading, opened[kind]) for kind in source}, rounds, warmup=1)
    rows = rows_of({kind: [block.images_per_s for block in found] for kind, found in blocks.items()}, reads)
    shown = table_of_figures("", "", "median", "range", title=f"{preset}, batch {batch_size}, {what}", box=SIMPLE)
    for row in rows:
        shown.add_row(row["what"], row["unit"], *median_and_range(row, digits=2 if row["unit"] == "ratio" else 0))
    console.print(shown)
    settings = {"recipe": preset, "batch_size": batch_size, "images": what, "entries": entries, "device": device}
    counts = {"threads": threads, "rounds": rounds, "steps": steps, "measure": "sources"}
    path = append(output, "loader", [{**settings, **counts, **common(), **row} for row in rows])
    console.print(f"rows appended to {path}")
