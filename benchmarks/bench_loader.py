"""Images per second and processor time of decoding and augmentation, against torchvision and decoding alone.

    unigrad-fast bench loader [--images PHOTOGRAPHS] [--recipe simsiam] [--device gpu]

    ours                     `Loader` as shipped, on as many threads as there are cores
    torchvision v1           `transforms` on Pillow images, as SimSiam's published code has them
    torchvision v2, Pillow   `transforms.v2` on Pillow images
    torchvision v2, tensors  `transforms.v2` on uint8 tensors that torchvision decoded
    DALI, decoding alone     on the threads and the device of ours
    Pillow, decoding alone   in the processes of torchvision's

torchvision and Pillow work in a DataLoader with as many worker processes as there are cores. All decode a file once
per image, with the numbers of the same recipe. torchvision's operations are those that cost it least: Pillow images
are blurred by Pillow, tensors with the narrowest window that holds three deviations.

Each variant lives in a process of its own, and they take turns: one block of batches each, round after round. A
process begins and ends its block at rest, with full queues, so that the processor time in between (that of its
worker processes included) belongs to as many images as were taken. The wall clock starts when the batches that lay
in the queues are used up. Memory is that of a fresh process of ours, after each epoch of a small manifest in small
batches: DALI's buffers grow to the largest image that each place of a batch has met, which takes long in large ones
and would look like a leak.

The images lie as files in a temporary folder and are in the page cache before anything is measured. Rows go to
results/loader.jsonl.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import io
import multiprocessing
import os
import random
import shutil
import statistics
import tarfile
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Generator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageFilter
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler
from torchvision import transforms
from torchvision.io import decode_image
from torchvision.transforms import InterpolationMode, v2

from unigrad_fast.benchmarks.bench_step import DRAWN_PER_CLASS, DRAWN_SIZE, MOST_REST
from unigrad_fast.benchmarks.processes import end_with_parent
from unigrad_fast.benchmarks.record import append, spread
from unigrad_fast.images import drawing
from unigrad_fast.pipelines import Loader, Manifest
from unigrad_fast.pipelines import recipe as views_of
from unigrad_fast.pipelines.files.headers import EXTENSIONS
from unigrad_fast.pipelines.recipes import DEVIATION, MEAN, View
from unigrad_fast.runtime.errors import DataError, UserError

RECIPES = ("simsiam", "multicrop")  # measured unless one is named
ENTRIES = 2048  # files, at least and at most
SMALL_ENTRIES, SMALL_BATCH = 256, 8  # images of an epoch and of a batch that memory is measured with
QUEUE = 2  # batches per worker process that a DataLoader makes ahead
LEAST_WARMUP = 4  # batches; no fewer than DALI makes ahead
QUIET, WORK = 0.3, 0.01  # seconds that count as rest, with less processor time than this
ENDLESS = 2**40

Batches = Generator[object, None, None]


@dataclass(frozen=True)
class Setting:
    """What every variant has to do.

    Attributes:
        views: the recipe.
        images, cache: folder of the files, and of the manifest's remembered sizes.
        batch_size: images per batch.
        threads: of ours; worker processes of the others.
        device: of ours, "cpu" or "gpu".
    """

    views: tuple[View, ...]
    images: Path
    cache: Path
    batch_size: int
    threads: int
    device: str

    @property
    def warmup(self) -> int:
        """Batches that may lie in the queues when a block begins."""
        return max(LEAST_WARMUP, QUEUE * self.threads)

    def manifest(self) -> Manifest:
        return Manifest.open(self.images, self.cache)


# The variants: endless batches each.


def ours(setting: Setting) -> Batches:
    loader = Loader(
        setting.manifest(), setting.views, setting.batch_size, device=setting.device, threads=setting.threads
    )
    for batch in loader.iterate():
        yield batch.views


def torchvision_v1(setting: Setting) -> Batches:
    tail = [transforms.ToTensor()]
    augment = [augmentation(view, transforms, blur_image(view), tail) for view in setting.views]
    yield from torch_batches(setting, lambda data: each(augment, read_image(data)))


def torchvision_v2_pillow(setting: Setting) -> Batches:
    tail = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
    augment = [augmentation(view, v2, blur_image(view), tail) for view in setting.views]
    yield from torch_batches(setting, lambda data: each(augment, read_image(data)))


def torchvision_v2_tensors(setting: Setting) -> Batches:
    tail = [v2.ToDtype(torch.float32, scale=True)]
    augment = [augmentation(view, v2, blur_tensor(view), tail) for view in setting.views]
    yield from torch_batches(setting, lambda data: each(augment, read_tensor(data)))


def dali_decoding(setting: Setting) -> Batches:
    from nvidia.dali import fn, pipeline_def, types

    manifest = setting.manifest()
    on_gpu = setting.device == "gpu"
    order = iter(RandomSampler(manifest, num_samples=ENDLESS))

    def encoded() -> list[np.ndarray]:
        return [np.frombuffer(manifest.read(next(order)), np.uint8) for _ in range(setting.batch_size)]

    @pipeline_def(
        batch_size=setting.batch_size,
        num_threads=setting.threads,
        device_id=torch.cuda.current_device() if on_gpu else None,
        prefetch_queue_depth=2,
    )
    def define() -> Any:
        data = fn.external_source(source=encoded, batch=True)
        device = "mixed" if on_gpu else "cpu"
        return fn.decoders.image(data, device=device, output_type=types.RGB, adjust_orientation=False)

    pipeline = define()
    while True:
        yield pipeline.run()


def pillow_decoding(setting: Setting) -> Batches:
    yield from torch_batches(setting, lambda data: read_image(data).size)


OURS, DALI, PILLOW = "ours", "DALI, decoding alone", "Pillow, decoding alone"
TORCHVISION: dict[str, Callable[[Setting], Batches]] = {
    "torchvision v1": torchvision_v1,
    "torchvision v2, Pillow": torchvision_v2_pillow,
    "torchvision v2, tensors": torchvision_v2_tensors,
}
VARIANTS = {OURS: ours, **TORCHVISION, DALI: dali_decoding, PILLOW: pillow_decoding}


def augmentation(
    view: View, kit: ModuleType, blur: Callable[[Any], Any], tail: list[Callable[[Any], Any]]
) -> Callable[[Any], Tensor]:
    """A recipe's view by torchvision: a decoded image to a normalised tensor [3, size, size].

    Args:
        view: the numbers.
        kit: `torchvision.transforms` or its `v2`.
        blur: of an image.
        tail: what makes an fp32 tensor on the scale 0..1 of it.
    """
    steps = [
        kit.RandomResizedCrop(view.size, view.scale, view.ratio, InterpolationMode(view.interpolation), antialias=True)
    ]
    if view.jitter_probability:
        steps.append(kit.RandomApply([kit.ColorJitter(*view.jitter)], view.jitter_probability))
    if view.gray_probability:
        steps.append(kit.RandomGrayscale(view.gray_probability))
    if view.blur_probability:
        steps.append(kit.RandomApply([blur], view.blur_probability))
    if view.solarize_probability:
        steps.append(kit.RandomSolarize(128, view.solarize_probability))
    return kit.Compose([*steps, kit.RandomHorizontalFlip(view.flip_probability), *tail, kit.Normalize(MEAN, DEVIATION)])


def blur_image(view: View) -> Callable[[Image.Image], Image.Image]:
    return lambda image: image.filter(ImageFilter.GaussianBlur(random.uniform(*view.blur_sigma)))


def blur_tensor(view: View) -> Callable[[Tensor], Tensor]:
    return v2.GaussianBlur(2 * int(np.ceil(3 * view.blur_sigma[1])) + 1, view.blur_sigma)


def each(augment: list[Callable[[Any], Tensor]], image: object) -> list[Tensor]:
    return [view(image) for view in augment]


def read_image(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data)).convert("RGB")


def read_tensor(data: bytes) -> Tensor:
    """uint8 [3, H, W]; by Pillow where torchvision comes without a decoder for the file."""
    try:
        return decode_image(torch.frombuffer(bytearray(data), dtype=torch.uint8), "RGB")
    except RuntimeError:
        return v2.functional.pil_to_tensor(read_image(data))


@dataclass(frozen=True)
class Files(Dataset):
    """The images of a manifest, transformed from their encoded bytes."""

    manifest: Manifest
    transform: Callable[[bytes], object]

    def __len__(self) -> int:
        return len(self.manifest)

    def __getitem__(self, index: int) -> object:
        return self.transform(self.manifest.read(index))


def torch_batches(setting: Setting, transform: Callable[[bytes], object]) -> Batches:
    files = Files(setting.manifest(), transform)
    yield from DataLoader(
        files,
        batch_size=setting.batch_size,
        # One iteration for all batches: worker processes are started once.
        sampler=RandomSampler(files, num_samples=ENDLESS),
        num_workers=setting.threads,
        prefetch_factor=QUEUE,
        multiprocessing_context="fork",  # the transforms are closures; and a plain script's default
    )


@dataclass(frozen=True)
class Block:
    """A block of batches: images/s by the wall clock, and processor time per image in ms."""

    images_per_s: float
    cpu_ms: float


class Worker:
    """A variant in a process of its own, in which it is the only one."""

    current: Worker

    def __init__(self, what: str, setting: Setting):
        self.setting = setting
        self.batches = VARIANTS[what](setting)
        next(self.batches)
        self._rest()

    @classmethod
    def start(cls, what: str, setting: Setting) -> None:
        threading.Thread(target=end_with_parent, daemon=True).start()
        cls.current = cls(what, setting)

    @classmethod
    def block(cls, steps: int) -> Block:
        worker, batch_size = cls.current, cls.current.setting.batch_size
        warmup = worker.setting.warmup
        start = worker._cpu_seconds()
        worker._run(warmup)
        seconds = worker._run(steps)
        worker._rest()
        cpu_seconds = worker._cpu_seconds() - start
        return Block(steps * batch_size / seconds, 1000 * cpu_seconds / ((warmup + steps) * batch_size))

    @classmethod
    def stop(cls) -> None:
        cls.current.batches.close()

    def _run(self, steps: int) -> float:
        """Seconds of some batches."""
        start = time.perf_counter()
        for _ in range(steps):
            next(self.batches)
        if self.setting.device == "gpu":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    def _cpu_seconds(self) -> float:
        """Processor time of this process and its living children."""
        children = multiprocessing.active_children()
        return time.process_time() + sum(time.clock_gettime(cpu_clock(child.pid)) for child in children)

    def _rest(self) -> None:
        """Returns when this process and its children compute no more: all queues are full."""
        end = time.monotonic() + MOST_REST
        while time.monotonic() < end:
            before = self._cpu_seconds()
            time.sleep(QUIET)
            if self._cpu_seconds() - before < WORK:
                return
        warnings.warn(f"a variant still computes {MOST_REST:g} s after its block, beside the next one", stacklevel=2)


def cpu_clock(pid: int) -> int:
    """Linux's clock of the processor time of a process and all its threads, for `clock_gettime`."""
    return ~pid << 3 | 2


def resident_after_epochs(setting: Setting, epochs: int) -> list[float]:
    """MiB of this process after each epoch of ours, a first one left out."""
    loader = Loader(
        setting.manifest(), setting.views, setting.batch_size, device=setting.device, threads=setting.threads
    )
    batches = loader.iterate()
    resident = []
    for _ in range(1 + epochs):
        for _ in range(loader.steps_per_epoch):
            next(batches)
        resident.append(resident_mib())
    loader.close()
    return resident[1:]


def resident_mib() -> float:
    """MiB of this process, without memory that is free and not yet given back to the system."""
    ctypes.CDLL(None).malloc_trim(0)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmRSS"].split()[0]) / 1024


def find_images(given: Path | None, folder: Path) -> tuple[list[Path], str]:
    """Up to ENTRIES images as files, those that are none yet written into `folder`, and what they are.

    Raises:
        DataError: there is none that can be decoded.
    """
    folder.mkdir()
    if given is None:
        found = Manifest.open(drawing.draw(folder / "drawn", 0, DRAWN_PER_CLASS, 1, DRAWN_SIZE) / "train", folder)
        paths, what = [Path(found.path(i)) for i in range(len(found))], f"drawn images of {DRAWN_SIZE} pixels"
    elif given.is_file() and tarfile.is_tarfile(given):
        paths, what = extract(given, folder), f"images of {given.name}"
    else:
        paths, what = choose(Manifest.open(given, folder), folder), f"images of {given.name}"
    with ThreadPoolExecutor() as pool:
        usable = [path for path, decodes in zip(paths, pool.map(is_decodable, paths), strict=True) if decodes]
    if not usable:
        raise DataError(f"images = {given}: none of {len(paths)} images can be decoded; give a folder of images")
    if len(usable) < len(paths):
        what += f" ({len(paths) - len(usable)} left out, they cannot be decoded)"
    return usable, f"{len(usable):,} {what}"


def extract(archive: Path, folder: Path) -> list[Path]:
    """The first ENTRIES images of a tar, at any depth, written into a folder."""
    paths: list[Path] = []
    with tarfile.open(archive) as tar:
        for member in tar:
            if len(paths) == ENTRIES:
                break
            if member.isfile() and member.name.lower().endswith(EXTENSIONS):
                paths.append(folder / f"{len(paths):06}{Path(member.name).suffix}")
                with paths[-1].open("wb") as file:
                    shutil.copyfileobj(tar.extractfile(member), file)
    return paths


def choose(found: Manifest, folder: Path) -> list[Path]:
    """Up to ENTRIES images of a manifest, spread evenly; those that are no files are written into a folder."""
    positions = np.setdiff1d(np.arange(len(found)), found.unreadable())
    paths = []
    for index in positions[:: -(-len(positions) // ENTRIES)].tolist():
        paths.append(Path(found.path(index)))
        if not paths[-1].is_file():
            paths[-1] = folder / f"{index:09}{paths[-1].suffix}"
            paths[-1].write_bytes(found.read(index))
    return paths


def is_decodable(path: Path) -> bool:
    """Whether Pillow decodes a file, which is in the page cache afterwards."""
    try:
        read_image(path.read_bytes())
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
        return False
    return True


def link_images(paths: list[Path], folder: Path, count: int) -> Path:
    """A flat folder of `count` links to images, each of them equally often or once more."""
    folder.mkdir()
    for number in range(count):
        path = paths[number % len(paths)]
        (folder / f"{number:06}{path.suffix}").symlink_to(path)
    return folder


def new_process() -> ProcessPoolExecutor:
    """A process forked from one that has imported this module and done nothing else."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return ProcessPoolExecutor(1, context)


def measure(setting: Setting, rounds: int, steps: int, status: Callable[[str], None]) -> dict[str, list[Block]]:
    """The blocks of every variant, one per round."""
    blocks: dict[str, list[Block]] = {what: [] for what in VARIANTS}
    with ExitStack() as stack:
        pools = {what: stack.enter_context(new_process()) for what in VARIANTS}
        status("starting")
        for start in [pool.submit(Worker.start, what, setting) for what, pool in pools.items()]:
            start.result()
        for number in range(rounds):
            for what, pool in pools.items():
                status(f"round {number + 1} of {rounds}: {what}")
                blocks[what].append(pool.submit(Worker.block, steps).result())
        for pool in pools.values():
            pool.submit(Worker.stop).result()
    return blocks


def measure_memory(setting: Setting, epochs: int) -> list[float]:
    with new_process() as pool:
        return pool.submit(resident_after_epochs, setting, epochs).result()


def rows_of(blocks: dict[str, list[Block]], views: int) -> list[dict]:
    """A row per variant and per ratio: median, least and most over the rounds."""
    rows = []
    for what, measured in blocks.items():
        speed = spread([block.images_per_s for block in measured])
        made = 0 if what in (DALI, PILLOW) else views
        cpu = {f"cpu_ms_{key}": value for key, value in spread([block.cpu_ms for block in measured]).items()}
        rows.append({"what": what, "unit": "images/s", **speed, "views_per_s": made * speed["median"], **cpu})

    def compare(name: str, value: Callable[[Block, Block], float], other: str) -> None:
        values = [value(a, b) for a, b in zip(blocks[OURS], blocks[other], strict=True)]
        rows.append({"what": name, "unit": "ratio", **spread(values)})

    best = max(TORCHVISION, key=lambda what: statistics.median(block.images_per_s for block in blocks[what]))
    for other in TORCHVISION:
        mark = ", its best" if other == best else ""
        compare(f"images/s, ours / {other}{mark}", lambda a, b: a.images_per_s / b.images_per_s, other)
    compare(f"processor time, {best} / ours", lambda a, b: b.cpu_ms / a.cpu_ms, best)
    compare(f"images/s, ours / {DALI}", lambda a, b: a.images_per_s / b.images_per_s, DALI)
    return rows


def memory_row(resident: list[float]) -> dict:
    """Memory after each epoch, and the slope of the straight line through it, MiB per epoch."""
    slope = float(np.polyfit(np.arange(len(resident)), resident, 1)[0])
    return {"what": "ours, memory", "unit": "MiB", **spread(resident), "after_epochs": resident, "slope": slope}


def show(console: Console, title: str, rows: list[dict], memory: dict) -> None:
    headers = ("", "images/s", "range", "views/s", "CPU ms", "range")
    table = Table(*headers, title=title, box=SIMPLE, pad_edge=False, collapse_padding=True)
    ratios = Table("ratio, round by round", "median", "range", box=SIMPLE, pad_edge=False)
    for column in (*table.columns[1:], *ratios.columns[1:]):
        column.justify = "right"
    for row in rows:
        if row["unit"] == "ratio":
            ratios.add_row(row["what"], f"{row['median']:.2f}", f"{row['least']:.2f} to {row['most']:.2f}")
            continue
        table.add_row(
            row["what"],
            f"{row['median']:,.0f}",
            f"{row['least']:,.0f} to {row['most']:,.0f}",
            f"{row['views_per_s']:,.0f}" if row["views_per_s"] else "",
            f"{row['cpu_ms_median']:.1f}",
            f"{row['cpu_ms_least']:.1f} to {row['cpu_ms_most']:.1f}",
        )
    console.print(table, ratios)
    after = ", ".join(f"{mib:.0f}" for mib in memory["after_epochs"])
    console.print(f"memory of ours after each epoch, MiB: {after}; slope {memory['slope']:+.2f} MiB per epoch")


def require_shared_memory(setting: Setting) -> None:
    """Raises UserError where the batches in torchvision's queues would not fit into shared memory."""
    batch = setting.batch_size * sum(4 * 3 * view.size**2 for view in setting.views)
    needed = len(TORCHVISION) * (QUEUE * setting.threads + 1) * batch
    free = shutil.disk_usage("/dev/shm").free
    if needed > free:
        raise UserError(
            f"torchvision's worker processes need {needed / 2**30:.1f} GiB of shared memory and /dev/shm has "
            f"{free / 2**30:.1f}; use a smaller batch_size than {setting.batch_size}, fewer threads than "
            f"{setting.threads}, or give the container more (docker run --shm-size)"
        )


def main(
    images: Path | None = None,
    recipe: str | None = None,
    device: str = "cpu",
    batch_size: int = 64,
    image_size: int | None = None,
    threads: int | None = None,
    rounds: int = 3,
    steps: int = 8,
    epochs: int = 5,
) -> None:
    """Measure, print the tables and append the rows.

    Args:
        images: what `Manifest.open` takes, or a tar with images in folders; None draws some.
        recipe: a preset's name; None for those of RECIPES, one after the other.
        device: of ours, "cpu" or "gpu".
        batch_size: images per batch.
        image_size: side of the global views, pixels; None is the preset's.
        threads: threads of ours, and worker processes of the others; None is the cores.
        rounds: turns of every variant.
        steps: measured batches of a turn, at least; each worker process makes equally many.
        epochs: of the measurement of memory.

    Raises:
        UserError: there is no GPU, or too little shared memory.
        DataError: the images or the recipe cannot be used.
    """
    if device == "gpu" and not torch.cuda.is_available():
        raise UserError("device = gpu: torch finds no GPU; use --device cpu")
    presets = {name: views_of(name, image_size) for name in ([recipe] if recipe else RECIPES)}
    threads = threads or len(os.sched_getaffinity(0))
    steps = -(-steps // threads) * threads
    console = Console()
    if images is None:
        console.print("images are drawn and unlike photographs; give --images for figures that mean something")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths, what = find_images(images, folder / "found")
        entries = max(batch_size, ENTRIES)
        linked = link_images(paths, folder / "images", entries)
        few = link_images(paths, folder / "few", SMALL_ENTRIES)
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
            path = append("loader", [{**common, **row} for row in (*rows, memory)])
    console.print(f"images/s and views/s by the wall clock, CPU ms per image; rows appended to {path}")


def versions() -> dict[str, str]:
    found = {item.metadata["Name"]: item.version for item in importlib.metadata.distributions()}
    dali = next(version for name, version in found.items() if name and name.startswith("nvidia-dali"))
    return {"dali": dali, "torchvision": found["torchvision"], "pillow": found["pillow"]}
