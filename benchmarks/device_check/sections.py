"""The sections of the check, the most telling first, and how they share the time."""

from __future__ import annotations

import gc
import importlib.util
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch

from unigrad_fast.benchmarks.device_check import data, graph, kernels, norm, product, step
from unigrad_fast.benchmarks.device_check.finding import Finding, findings
from unigrad_fast.benchmarks.measures import objective
from unigrad_fast.runtime.errors import DataError, UserError


@dataclass(frozen=True)
class Place:
    """Where and for how long the sections run.

    Attributes:
        images: the user's photographs, if any.
        output: folder of the rows; None records nothing.
        clock: seconds; end: when everything has to have ended.
    """

    device: torch.device
    images: Path | None = None
    output: Path | None = None
    clock: Callable[[], float] = time.monotonic
    end: float = float("inf")

    @property
    def left(self) -> float:
        return self.end - self.clock()


class Section(NamedTuple):
    """A part of the check: its function, the seconds that it is expected to take on an H200, and what it shows."""

    check: Callable[[Place], Iterator[Finding]]
    seconds: float
    shows: str


def correctness(place: Place) -> Iterator[Finding]:
    with implementation("triton", place):
        yield from kernels.check(place.device)


def norms(place: Place) -> Iterator[Finding]:
    yield from norm.layers(place.device, place.output)
    yield from product.layers(place.device, place.output)


def replaying(place: Place) -> Iterator[Finding]:
    yield from findings((graph.replaying, step.networks), place.device)


def shapes(place: Place) -> Iterator[Finding]:
    """The objective at each shape against others, and its kernels against the roofline."""
    on_gpu = place.device.type == "cuda"
    wanted, begun = kernels.SHAPES if on_gpu else ((40, 4),), []

    def in_time() -> Iterator[tuple[int, int]]:
        for shape in wanted:
            if place.left < SHAPE_SECONDS:
                return
            begun.append(shape)
            yield shape

    rows = objective.bench(
        place.device,
        in_time(),
        repetitions=11 if on_gpu else 2,
        block_seconds=0.1 if on_gpu else 0.0,
        most_seconds=15.0,
        compiled=on_gpu,
        output=place.output,
    )
    for width, images in wanted:
        of = [row for row in rows if (row["width"], row["images"]) == (width, images)]
        what = f"objective, C {width}, N {images}"
        if not of:
            yield Finding(what, NO_TIME.format(left=place.left), False)
        for row in of:
            if row["unit"] == "ratio":
                yield Finding(what, f"{row['median']:5.2f}  {row['what']}", True)
    if on_gpu:
        yield from kernels.times(place.device, begun)


NO_TIME = "not checked: only {left:.0f} s are left"
SHAPE_SECONDS = 40.0  # expected of one shape, most of it torch.compile's
SECTIONS = {
    "step": Section(
        lambda place: graph.steps(place.device, place.output),
        95,
        "steps of 128, 64 and 32 images, launched and replayed; in fp16, of 128",
    ),
    "norm": Section(norms, 25, "each kernel of batch norm by layer, and products between norms"),
    "correctness": Section(correctness, 55, "the kernels against float64, against themselves, in graphs and streams"),
    "replaying": Section(replaying, 60, "replayed steps bit by bit, waits of the host on two ranks"),
    "nccl": Section(
        lambda place: graph.exchanging(place.device, place.output), 45, "steps with collectives, through NCCL"
    ),
    "shapes": Section(shapes, 3 * SHAPE_SECONDS + 10, "the objective against others and its roofline"),
    "variants": Section(
        lambda place: step.variants(place.device, place.output), 60, "the step by part, against others"
    ),
    "photometric": Section(lambda place: data.photometric_in_torch(place.device), 10, "augmentation in torch"),
    "data": Section(
        lambda place: data.check(place.device, place.images, place.output), 150, "the data path, with DALI"
    ),
}


def implementation(name: str, place: Place):
    """A context for the CPU in which an implementation of the kernels is used; a GPU has its own choice."""
    return mock.patch.dict(os.environ, {} if place.device.type == "cuda" else {"UNIGRAD_KERNELS": name})


def default_names() -> list[str]:
    """All sections, except the data path if there is no DALI."""
    has_dali = all(importlib.util.find_spec(name) is not None for name in ("nvidia", "nvidia.dali"))
    return [name for name in SECTIONS if name != "data" or has_dali]


def run(name: str, place: Place) -> Iterator[Finding]:
    """The findings of a section; one that fails if it raises, finds nothing, is not begun or not finished in time.

    Raises:
        DataError, UserError: a user's mistake.
    """
    section, count = SECTIONS[name], 0
    if place.left < section.seconds:
        yield Finding(name, f"{NO_TIME.format(left=place.left)}, and {section.seconds:g} s may be needed", False)
        return
    try:
        with implementation("torch", place):
            for finding in section.check(place):
                count += 1
                yield finding
                if place.left < 0:
                    yield Finding(name, "not finished: the time is up", False)
                    break
    except (DataError, UserError):
        raise
    except Exception as error:
        yield Finding(name, f"{type(error).__name__}: {error}".replace("\n", " ")[:300], False)
    else:
        if not count:
            yield Finding(name, "nothing was checked", False)
    finally:
        gc.collect()  # trainers are cycles
        if place.device.type == "cuda":
            torch.cuda.empty_cache()
