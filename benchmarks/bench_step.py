"""Images per second and peak memory of a training step, against a plain loop in the authors' formulation.

    unigrad-fast bench step [--case resnet50|resnet18|all] [--images FOLDER]

    authors   images decoded and augmented by Pillow and torchvision in 2 worker processes, contiguous memory, the
              objective in whole-matrix torch expressions, torch's SGD, a target update parameter by parameter
    ours      a step of `pretrain` as shipped: DALI, channels-last memory, our objective, DeepSpeed, all reports
    ceiling   our networks alone on images that lie in memory: target forward, online forward, backward of a sum

All start from the same weights and read the same images. Each variant lives in a process of its own and they take
turns: one block of steps each, round after round, every block begun by steps that are not measured. A process may
still fill its queues of images after its block; the next one starts when it has come to rest. Where data is slower
than the networks, take as many `--warmup` steps as those queues hold batches (4), or a block begins with a gift.

Peak memory is that of the variant's process (without the authors' worker processes), on a GPU that of torch's
allocator (without DALI's). Rows go to results/step.jsonl.
"""

from __future__ import annotations

import copy
import ctypes
import itertools
import multiprocessing
import os
import random
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image, ImageFilter
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler
from torchvision import transforms
from torchvision.datasets import ImageFolder

from unigrad_fast.benchmarks.authors import authors_loss
from unigrad_fast.benchmarks.processes import end_with_parent
from unigrad_fast.benchmarks.record import append, spread
from unigrad_fast.config import Config, resolve
from unigrad_fast.images import drawing
from unigrad_fast.networks.encoder import Encoder, build_encoder
from unigrad_fast.pipelines import Manifest
from unigrad_fast.pipelines.recipes import DEVIATION, MEAN
from unigrad_fast.runtime import process_group
from unigrad_fast.runtime.errors import UserError
from unigrad_fast.runtime.precision import autocast_dtype
from unigrad_fast.runtime.process_group import World
from unigrad_fast.training.target import make_target

DRAWN_PER_CLASS, DRAWN_SIZE = 5, 400  # pixels, about those of a photograph of ImageNet
LEAST_BATCHES = 4  # per epoch
MOST_REST = 60.0  # seconds that a variant may take to come to rest
VARIANTS = [(who, precision) for who in ("authors", "ours", "ceiling") for precision in ("fp32", "bf16")]


@dataclass(frozen=True)
class Case:
    """A network and its input: images of `image_size` pixels a side, `batch_size` of them per step."""

    backbone: str
    image_size: int
    batch_size: int


CASES = {"resnet50": Case("resnet50", 224, 16), "resnet18": Case("resnet18", 96, 64)}


@dataclass(frozen=True)
class Block:
    """What a block of steps took: images/s (two views each), GiB at the peak until now, ms per phase of a step."""

    images_per_s: float
    peak_gib: float
    phases: dict[str, float]


class Variant:
    """A way to train; `step` makes one step."""

    def __init__(self, config: Config, world: World):
        self.config, self.device = config, world.device
        self.dtype = autocast_dtype(config.engine.precision, world.device)

    def step(self) -> None:
        raise NotImplementedError

    def phases(self, steps: int) -> dict[str, float]:
        """Milliseconds per phase, means over the last steps, as far as the variant measures them."""
        return {}

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not None)


class Authors(Variant):
    """The published formulation as a plain loop."""

    def __init__(self, config: Config, world: World):
        super().__init__(config, world)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            self.online = Encoder(config.model).to(self.device).train()
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        settings = config.optimizer
        self.optimizer = torch.optim.SGD(
            self.online.parameters(),
            lr=settings.base_lr * config.data.batch_size / 256,
            momentum=settings.momentum,
            weight_decay=settings.weight_decay,
        )
        self.correlation: Tensor | None = None
        self.batches = self._batches()

    def _batches(self) -> Iterator[list[Tensor]]:
        data = self.config.data
        augment = simsiam_augmentation(data.image_size)
        dataset = ImageFolder(str(data.train), transform=lambda image: [augment(image), augment(image)])
        loader = DataLoader(
            dataset,
            batch_size=data.batch_size,
            # One iteration for all steps: worker processes are started once.
            sampler=RandomSampler(dataset, num_samples=self.config.schedule.epochs * len(dataset)),
            num_workers=2,
            multiprocessing_context="fork",  # a plain loop's default, which the spawned process has lost
            pin_memory=self.device.type == "cuda",
            drop_last=True,
        )
        for views, _ in loader:
            yield views

    def step(self) -> None:
        views = [view.to(self.device, non_blocking=True) for view in next(self.batches)]
        with self.autocast():
            with torch.no_grad():
                target = self.target(views)
            online = self.online(views)
            settings = self.config.objective
            loss, self.correlation = authors_loss(online, target, self.correlation, settings.balance, settings.decay)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        momentum = self.config.target.momentum
        for mine, theirs in zip(self.target.parameters(), self.online.parameters(), strict=True):
            mine.data = mine.data * momentum + theirs.data * (1 - momentum)


def simsiam_augmentation(size: int) -> transforms.Compose:
    """SimSiam's augmentation by torchvision: a Pillow image to a normalised tensor [3, size, size]."""

    def blur(image: Image.Image) -> Image.Image:
        return image.filter(ImageFilter.GaussianBlur(random.uniform(0.1, 2.0)))

    return transforms.Compose(
        [
            transforms.RandomResizedCrop(size, scale=(0.2, 1.0)),
            transforms.RandomApply([transforms.ColorJitter(0.4, 0.4, 0.4, 0.1)], p=0.8),
            transforms.RandomGrayscale(p=0.2),
            transforms.RandomApply([blur], p=0.5),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(MEAN, DEVIATION),
        ]
    )


class Ours(Variant):
    """What `pretrain` does in a step, its reports and checks of earlier steps included."""

    def __init__(self, config: Config, world: World):
        super().__init__(config, world)
        from unigrad_fast.training.trainer import Trainer  # here: the others' memory is not to hold DeepSpeed and DALI

        self.trainer = Trainer(config, world, Manifest.open(config.data.train))
        self.batches = self.trainer.loader.iterate(stop_step=self.trainer.total_steps * self.trainer.accumulation)
        self.steps = 0
        self.metrics: list[dict[str, float]] = []

    def step(self) -> None:
        self.trainer.step(self.steps, self.batches)
        self._receive()
        self.steps += 1

    def _receive(self) -> None:
        """Reports of earlier steps, one step late as in `pretrain`."""
        self.trainer.gate.check(self.steps)
        self.metrics += [metrics for _, metrics in self.trainer.metrics(before=self.steps)]

    def phases(self, steps: int) -> dict[str, float]:
        self._receive()
        last = self.metrics[-steps:]
        return {key: statistics.fmean(m[key] for m in last) for key in last[0] if key.startswith("ms_")}


class Ceiling(Variant):
    """The networks alone, as ours lay them out."""

    def __init__(self, config: Config, world: World):
        super().__init__(config, world)
        self.online = build_encoder(config.model, config.seed, self.device).to(memory_format=torch.channels_last)
        self.target = make_target(self.online)
        shape = (config.data.batch_size, 3, config.data.image_size, config.data.image_size)
        views = (torch.randn(shape, device=self.device) for _ in range(2))
        self.views = [view.to(memory_format=torch.channels_last) for view in views]

    def step(self) -> None:
        with self.autocast():
            with torch.no_grad():
                self.target(self.views)
            online = self.online(self.views)
        self.online.zero_grad()
        torch.cat(online).sum().backward()


class Worker:
    """A variant in a process of its own, in which it is the only one."""

    current: Worker

    def __init__(self, variant: type[Variant], config: Config):
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        self.session = ExitStack()
        self.world = self.session.enter_context(process_group.session())
        self.variant = variant(config, self.world)

    @classmethod
    def start(cls, who: str, config: Config) -> None:
        threading.Thread(target=end_with_parent, daemon=True).start()
        cls.current = cls({"authors": Authors, "ours": Ours, "ceiling": Ceiling}[who], config)

    @classmethod
    def block(cls, warmup: int, steps: int) -> Block:
        """Measures a block of steps, and returns when the process is at rest again."""
        worker = cls.current
        worker._run(warmup)
        seconds = worker._run(steps)
        block = Block(
            images_per_s=steps * worker.variant.config.data.batch_size / seconds,
            peak_gib=worker._peak() / 2**30,
            phases=worker.variant.phases(steps),
        )
        worker._rest()
        return block

    @classmethod
    def stop(cls) -> None:
        cls.current.session.close()

    def _run(self, steps: int) -> float:
        """Seconds of some steps, until the device is done with them."""
        start = time.perf_counter()
        for _ in range(steps):
            self.variant.step()
        if self.world.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    def _peak(self) -> int:
        """Bytes of memory at the peak."""
        if self.world.device.type == "cuda":
            return torch.cuda.max_memory_allocated()
        # ru_maxrss would also know the process that this one was forked from.
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return int(status["VmHWM"].split()[0]) * 1024

    def _rest(self) -> None:
        """Gives free memory back to the system and returns when this process and its children compute no more."""
        if self.world.device.type == "cuda":
            torch.cuda.empty_cache()
        else:
            ctypes.CDLL(None).malloc_trim(0)
        pids = [os.getpid(), *(child.pid for child in multiprocessing.active_children())]
        ticks = [cpu_ticks(pids)]
        end = time.monotonic() + MOST_REST
        while time.monotonic() < end:
            time.sleep(0.3)
            ticks.append(cpu_ticks(pids))
            if ticks[-1] - ticks[-2] <= 1:
                return
        warnings.warn(f"a variant still computes {MOST_REST:g} s after its block, beside the next one", stacklevel=2)


def cpu_ticks(pids: list[int]) -> int:
    """Processor time of some processes and all their threads, in ticks of usually 10 ms."""
    fields = (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids)
    return sum(int(user) + int(system) for _, _, _, _, _, _, _, _, _, _, _, user, system, *_ in fields)


def find_images(given: Path | None, folder: Path) -> tuple[Manifest, str]:
    """The images to use, drawn into `folder` where none are given, and what they are."""
    if given is not None:
        source, what = given, f"images of {given.name}"
    else:
        source = drawing.draw(folder / "drawn", 0, DRAWN_PER_CLASS, 1, DRAWN_SIZE) / "train"
        what = f"drawn images of {DRAWN_SIZE} pixels"
    found = Manifest.open(source)
    return found, f"{len(found):,} {what}"


def link_images(found: Manifest, folder: Path, count: int) -> Path:
    """An ImageFolder tree of `count` links to images: some of them, spread evenly, or all of them repeatedly."""
    links = folder / "images"
    links.mkdir(parents=True)
    for number in range(count):
        path = found.path(number * len(found) // count if count < len(found) else number % len(found))
        (links / f"{number:06}{Path(path).suffix}").symlink_to(path)
    return folder


def configure(case: Case, images: Path, precision: str, least_steps: int) -> Config:
    """The recipe `imagenet_100ep`, long enough for `least_steps`; every step is reported."""
    per_epoch = len(list(images.glob("*/*"))) // case.batch_size
    return resolve(
        "imagenet_100ep",
        {
            "data": {"train": images, "batch_size": case.batch_size, "image_size": case.image_size},
            "model": {"backbone": case.backbone},
            "schedule": {"epochs": max(100, -(-least_steps // per_epoch))},
            "engine": {"precision": precision},
            "telemetry": {"every": 1},
        },
    )


def measure(
    case: Case, images: Path, repetitions: int, steps: int, warmup: int, console: Console
) -> dict[tuple[str, str], list[Block]]:
    """The blocks of every variant, one per repetition."""
    blocks: dict[tuple[str, str], list[Block]] = {variant: [] for variant in VARIANTS}
    with ExitStack() as stack:
        status = stack.enter_context(console.status("starting"))
        pools: dict[tuple[str, str], ProcessPoolExecutor] = {}
        for who, precision in VARIANTS:
            config = configure(case, images, precision, repetitions * (warmup + steps))
            pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
            pools[who, precision] = stack.enter_context(pool)
            pool.submit(Worker.start, who, config).result()
        for repetition, (variant, pool) in itertools.product(range(repetitions), pools.items()):
            status.update(f"{case.backbone}, round {repetition + 1} of {repetitions}: {', '.join(variant)}")
            blocks[variant].append(pool.submit(Worker.block, warmup, steps).result())
        for pool in pools.values():
            pool.submit(Worker.stop).result()
    return blocks


def ratios(blocks: dict[tuple[str, str], list[Block]], shipped: str) -> dict[str, list[float]]:
    """Ratios of images/s, one per repetition; `shipped` is the precision that ours chooses by itself."""
    pairs = {
        f"ours as shipped ({shipped}) / authors, fp32": (("ours", shipped), ("authors", "fp32")),
        "ours / authors, bf16": (("ours", "bf16"), ("authors", "bf16")),
        "ours / authors, fp32": (("ours", "fp32"), ("authors", "fp32")),
        "ours / ceiling, bf16": (("ours", "bf16"), ("ceiling", "bf16")),
        "ours / ceiling, fp32": (("ours", "fp32"), ("ceiling", "fp32")),
    }
    return {
        name: [a.images_per_s / b.images_per_s for a, b in zip(blocks[above], blocks[below], strict=True)]
        for name, (above, below) in pairs.items()
    }


def rows_of(blocks: dict[tuple[str, str], list[Block]], shipped: str) -> list[dict]:
    """A row per variant (images/s) and per ratio: median, least and most over the repetitions."""
    rows = []
    for (who, precision), measured in blocks.items():
        phases = {key: statistics.median(block.phases[key] for block in measured) for key in measured[-1].phases}
        speed = spread([block.images_per_s for block in measured])
        peak = measured[-1].peak_gib
        rows.append({"what": f"{who}, {precision}", "unit": "images/s", **speed, "peak_gib": peak, "phases": phases})
    for name, values in ratios(blocks, shipped).items():
        rows.append({"what": name, "unit": "ratio", **spread(values)})
    return rows


def show(console: Console, title: str, rows: list[dict]) -> None:
    table = Table("", "median", "least to most", "peak, GiB", title=title)
    table.columns[0].header = "images/s"
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        digits = 2 if row["unit"] == "ratio" else 1
        median, least, most = (f"{row[key]:.{digits}f}" for key in ("median", "least", "most"))
        peak = f"{row['peak_gib']:.2f}" if "peak_gib" in row else ""
        table.add_row(row["what"], median, f"{least} to {most}", peak)
        table.rows[-1].end_section = row is rows[len(VARIANTS) - 1]
    console.print(table)
    for row in rows:
        if row.get("phases"):
            parts = (f"{key.removeprefix('ms_')} {value:.0f}" for key, value in row["phases"].items())
            console.print(f"{row['what']}, ms of a step: {', '.join(parts)}")


def main(
    case: str = "all",
    images: Path | None = None,
    batch_size: int | None = None,
    image_size: int | None = None,
    repetitions: int = 3,
    steps: int = 2,
    warmup: int = 1,
) -> None:
    """Measure, print the table and append the rows.

    Args:
        case: a key of CASES, or "all".
        images: folder of images, else drawn ones.
        batch_size, image_size: images per step, and their side in pixels, in place of the case's.
        repetitions: blocks of every variant.
        steps, warmup: measured steps of a block, and those before them.

    Raises:
        UserError: the environment says that this is one process of several.
        DataError: the images cannot be used.
    """
    if process_group.launch_environment(os.environ).size > 1:
        raise UserError("bench step measures one process; start it without torchrun, deepspeed or srun")
    console = Console()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shipped = "fp32" if autocast_dtype("auto", device) is None else "bf16"
    with tempfile.TemporaryDirectory() as folder:
        found, what = find_images(images, Path(folder))
        for name in CASES if case == "all" else [case]:
            chosen = CASES[name]
            batch = batch_size or chosen.batch_size
            chosen = Case(chosen.backbone, image_size or chosen.image_size, batch)
            needed = batch * max(LEAST_BATCHES, repetitions * (warmup + steps))
            count = max(LEAST_BATCHES * batch, min(needed, len(found)))
            linked = link_images(found, Path(folder, name), count)
            blocks = measure(chosen, linked, repetitions, steps, warmup, console)
            rows = rows_of(blocks, shipped)
            title = f"{chosen.backbone}, {chosen.image_size} px, batch {batch}, {what}"
            show(console, title, rows)
            setting = {
                "backbone": chosen.backbone,
                "image_size": chosen.image_size,
                "batch_size": batch,
                "images": what,
                "repetitions": repetitions,
                "steps": steps,
                "warmup": warmup,
                "threads": len(os.sched_getaffinity(0)),
            }
            path = append("step", [{**setting, **row} for row in rows])
    console.print(f"rows appended to {path}")
