"""What the Python of the data path costs the process that trains: how many operators its host calls beside a loader.

    python -m unigrad_fast.benchmarks.measures.loader_host [--preset simsiam] [--output benchmarks/results]

All threads of a process share Python's interpreter lock: autograd's, the one that draws parameters, the main one,
which also hands each batch to DALI, and, unless files are read in a process of its own, those that read. Here all of
them run as for a GPU, but DALI's graph only reads the sizes of images and returns its inputs: decoding and augmentation
happen in DALI's own threads, without the lock. The files have as many bytes as ImageNet's and are in the page cache.

The main thread calls small operators without pause, with and without a loader that delivers batches at a given rate;
the variants take turns. `operators` are additions; `operators and backward` are operators and functions of Python whose
backward pass runs in another thread, as on a GPU. The ratio shows all that the loader costs: the lock, waiting for it,
the handing over and, on a machine with few cores, the cores that its threads and processes take.

Then the parts are timed one by one in one thread: processor time per batch, during most of which the lock is held. Rows
are appended to OUTPUT/loader_host.jsonl.
"""

from __future__ import annotations

import io
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from unigrad_fast.benchmarks.harness.images import link_images
from unigrad_fast.benchmarks.harness.processes import rest
from unigrad_fast.benchmarks.harness.record import OUTPUT, append, make_folder
from unigrad_fast.benchmarks.harness.script import run
from unigrad_fast.benchmarks.harness.turns import median_and_range, ratio_row, take_turns
from unigrad_fast.pipelines import Loader, Manifest, graph
from unigrad_fast.pipelines.loader import INPUTS_AHEAD
from unigrad_fast.pipelines.reading import source as reading
from unigrad_fast.pipelines.reading.supply import Supply
from unigrad_fast.pipelines.stream import run_pipeline

if TYPE_CHECKING:
    from nvidia.dali.pipeline import Pipeline

IMAGES = 128  # of a batch
RATES = (13_000 / 8, 13_000)  # images/s: of one of a node's eight processes, and of one that has it all
BYTES, SIDE, ENTRIES = 110_000, 16, 2048  # of a file, about ImageNet's mean; pixels; files
READ_THREADS, READ_AHEAD = 32, 128 << 20  # the defaults of `data`
WHERE = {"in a process of its own": True, "in this process": False}  # that files are read, as for a GPU, and as else
ROUNDS, BLOCK_SECONDS = 5, 0.6
CHAIN = 10  # operators or functions between two looks at the clock
REPEATS = 15


class _Function(torch.autograd.Function):
    """A function of Python that changes nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy


def adding() -> Callable[[], None]:
    """A function that calls operators."""
    x = torch.zeros(8)

    def call() -> None:
        for _ in range(CHAIN):
            x.add_(1)

    return call


@contextmanager
def forward_and_backward() -> Iterator[Callable[[], None]]:
    """A function that calls operators and functions of Python, and their backward pass in another thread."""
    x = torch.zeros(8, requires_grad=True)
    with ThreadPoolExecutor(1) as other:

        def call() -> None:
            y = x
            for _ in range(CHAIN):
                y = _Function.apply(y + 1)
            other.submit(y.backward, torch.ones_like(y)).result()

        yield call


def padded_image(size: int) -> bytes:
    """A small JPEG file, followed by zeros up to so many bytes."""
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (SIDE, SIDE, 3), np.uint8)).save(file, "JPEG")
    return file.getvalue().ljust(size, b"\0")


def manifest(folder: Path, size: int) -> Manifest:
    """Many files of so many bytes, or of a few hundred if that is less."""
    folder.mkdir()
    image = folder / "image.jpg"
    image.write_bytes(padded_image(size))
    return Manifest.open(link_images(repeat(image, ENTRIES), folder / "links"), folder)


def made(images: Manifest, preset: str, apart: bool = False) -> Loader:
    loader = Loader(images, preset, IMAGES, threads=1, read_threads=READ_THREADS, read_ahead=READ_AHEAD)
    loader.apart = apart
    return loader


def build(inputs: int, source: Callable[[Any], list]) -> Pipeline:
    """A pipeline that returns its inputs, except for the images, and their sizes."""
    return graph._pipeline(lambda fn, types, data, arrays: arrays, inputs, IMAGES, source, 1, None)


def drawn(loader: Loader, supply: Supply) -> list[np.ndarray]:
    """The parameters of a batch, as the graph takes them."""
    found = supply.drawn = loader._draw(supply)
    views = zip(found.views, found.parameters, strict=True)
    return [array for view, parameters in views for array in graph.feed(view, parameters)]


def delivered(loader: Loader) -> Iterator[object]:
    """Batches without views, made as `Loader` does for a GPU."""

    def feed(supply: Supply) -> list:
        return [supply.data, *drawn(loader, supply)]

    inputs = 1 + sum(len(graph.inputs(view)) for view in loader.views)
    with closing(loader._source(None)) as source:
        yield from run_pipeline(source, partial(build, inputs), feed, None, ahead=INPUTS_AHEAD)


@dataclass(frozen=True)
class Block:
    """Calls per second, and the images that were taken per second meanwhile."""

    calls: float
    images: float


def block(call: Callable[[], object], batches: Iterator | None, rate: float) -> Block:
    """Calls in steps of as much time as a batch may take; in each a batch is taken."""
    rest()
    calls, steps, began = 0, max(2, round(BLOCK_SECONDS * rate / IMAGES)), time.perf_counter()
    for step in range(1, 1 + steps):
        if batches is not None:
            next(batches)
        while time.perf_counter() - began < step * IMAGES / rate:
            call()
            calls += 1
    took = time.perf_counter() - began
    return Block(calls / took, steps * IMAGES / took)


def compare(images: Manifest, preset: str) -> list[dict]:
    """A row per kind of call, rate and place of reading: the ratio of the calls with a loader to those without."""
    rows = []
    with ExitStack() as stack:
        loaders: dict[str, Iterator | None] = {"": None}
        for where, apart in WHERE.items():
            loaders[where] = stack.enter_context(closing(delivered(made(images, preset, apart))))
            next(loaders[where])
        calls = {"operators": adding(), "operators and backward": stack.enter_context(forward_and_backward())}
        for (what, call), rate in product(calls.items(), RATES):
            blocks = take_turns(
                {where: partial(block, call, batches, rate) for where, batches in loaders.items()}, ROUNDS, warmup=1
            )
            without = [each.calls for each in blocks.pop("")]
            for where, each in blocks.items():
                reached = statistics.median(one.images for one in each)
                more = {"where": where, "preset": preset, "images_per_s": rate, "reached": reached}
                rows.append(ratio_row(what, [one.calls for one in each], without, **more))
    return rows


def parts(images: Manifest, small: Manifest, preset: str) -> dict[str, float]:
    """Milliseconds of a thread's processor time per batch, by part.

    Args:
        images: files of the usual size, which are handed over.
        small: small files, which are read: of larger ones the bytes are copied without the lock.
    """
    with mock.patch.object(reading, "Threads", _AtOnce):
        sources = {where: made(small, preset, apart)._source(None) for where, apart in WHERE.items()}

    def read(source: reading.Source, step: int) -> None:
        source.take(step)
        source.done(step)

    loader, supply = made(images, preset), sources["in this process"].take(0)
    inputs = [[np.frombuffer(images.read(image), np.uint8) for image in range(IMAGES)], *drawn(loader, supply)]
    pipeline = build(len(inputs), lambda info: inputs)
    found = {f"reading {where}": _milliseconds(partial(read, source)) for where, source in sources.items()}
    for source in sources.values():
        source.close()
    found["drawing"] = _milliseconds(lambda _: drawn(loader, supply))
    return {**found, "handing over": _milliseconds(lambda _: pipeline.run())}


def _milliseconds(call: Callable[[int], object]) -> float:
    found = []
    for step in range(REPEATS):
        began = time.thread_time()
        call(step)
        found.append(1e3 * (time.thread_time() - began))
    return statistics.median(found)


class _AtOnce:
    """Instead of the threads that read: reads where it is called."""

    def __init__(self, count: int) -> None: ...

    def call(self, function: Callable[[], None]) -> None:
        function()

    def close(self) -> None: ...


def main(preset: str = "simsiam", output: Path = OUTPUT) -> None:
    """Measure, print and append the rows.

    Args:
        preset: augmentation preset.
        output: folder of loader_host.jsonl.
    """
    make_folder(output)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        images, small = manifest(Path(name) / "usual", BYTES), manifest(Path(name) / "small", 0)
        rows = compare(images, preset)
        held = parts(images, small, preset)
    for row in rows:
        share, ranged = median_and_range(row, digits=3)
        print(f"{row['what']}, {row['images_per_s']:,.0f} images/s read {row['where']}:")
        print(f"    {share} ({ranged}) of the calls without a loader; {row['reached']:,.0f} images/s reached")
    for what, each in held.items():
        print(f"{what:32} {each:6.2f} ms of a batch of {IMAGES}")
    rows.append({"what": "parts", "unit": "ms", "preset": preset, "images": IMAGES, "held": held})
    print(f"rows appended to {append(output, 'loader_host', rows)}")


if __name__ == "__main__":
    sys.exit(run(main))
