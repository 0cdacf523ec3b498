"""Measures the training step: every variant in its own process, taking turns block by block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from unigrad_fast.benchmarks.harness.memory import give_back_free_memory, process_bytes
from unigrad_fast.benchmarks.harness.neighbour import Neighbour
from unigrad_fast.benchmarks.harness.processes import in_processes, new_process, rest
from unigrad_fast.benchmarks.harness.turns import Turns, seconds, take_turns
from unigrad_fast.benchmarks.peers.step import VARIANTS
from unigrad_fast.config import Config, resolve
from unigrad_fast.runtime import process_group
from unigrad_fast.runtime.precision import fastest_convolutions, tensor_float32
from unigrad_fast.runtime.processors import compute_threads
from unigrad_fast.runtime.wording import count


class Subject(NamedTuple):
    """A variant in a precision, alone or beside a busy program with a number of compute threads of its own."""

    who: str
    precision: str
    threads_beside: int = 0

    def __str__(self) -> str:
        beside = f", beside: {count(self.threads_beside, 'thread')}" if self.threads_beside else ""
        return f"{self.who}, {self.precision}{beside}"


def subjects(precisions: Sequence[str]) -> list[Subject]:
    """Every variant in every precision."""
    return [Subject(who, precision) for who in VARIANTS for precision in precisions]


@dataclass(frozen=True)
class Case:
    """A network and its input: `batch_size` images per step, with `image_size` pixels per side."""

    backbone: str
    image_size: int
    batch_size: int


@dataclass(frozen=True)
class Block:
    """Results of a block of steps: images/s (two views each), peak GiB so far, ms per phase of a step."""

    images_per_s: float
    peak_gib: float
    phases: dict[str, float]


class StepWorker:
    """A variant in its own process."""

    def __init__(self, who: str, config: Config):
        with ExitStack() as session:  # closed here if the variant cannot be made, because others may wait for this one
            world = session.enter_context(process_group.session(config.engine.device))
            self.device = world.device
            session.enter_context(compute_threads(world.device, config.engine.threads))
            session.enter_context(tensor_float32(config.engine.tf32))
            session.enter_context(fastest_convolutions(world.device))
            self.variant = VARIANTS[who](config, world)
            session.callback(self.variant.close)
            self.session = session.pop_all()

    def block(self, warmup: int, steps: int) -> Block:
        """Measure a block of steps; returns when the process is idle again."""
        for _ in range(warmup):
            self.variant.step()
        each = seconds(self.variant.step, self.device, steps)
        block = Block(
            images_per_s=self.variant.config.data.batch_size / each,
            peak_gib=self.peak() / 2**30,
            phases=self.variant.phases(steps),
        )
        self.come_to_rest()
        return block

    def come_to_rest(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        else:
            give_back_free_memory()
        rest()

    def close(self) -> None:
        self.session.close()

    def peak(self) -> int:
        """Peak memory in bytes."""
        return torch.cuda.max_memory_allocated() if self.device.type == "cuda" else process_bytes("VmHWM")


def configure(case: Case, images: Path, precision: str, least_steps: int, threads: int) -> Config:
    """The recipe `imagenet_100ep` with enough epochs for `least_steps`; every step reports metrics."""
    per_epoch = len(list(images.glob("*/*"))) // case.batch_size
    return resolve(
        "imagenet_100ep",
        {
            "data": {"train": images, "batch_size": case.batch_size, "image_size": case.image_size},
            "model": {"backbone": case.backbone},
            "schedule": {"epochs": max(100, -(-least_steps // per_epoch))},
            "engine": {"precision": precision, "threads": threads},
            "telemetry": {"every": 1},
        },
    )


def measure(
    case: Case, images: Path, turns: Turns, report: Callable[[str], None], measured: Sequence[Subject]
) -> dict[Subject, list[Block]]:
    """The blocks of every subject, one per round."""
    workers = {}
    for subject in measured:
        threads = subject.threads_beside or torch.get_num_threads()
        config = configure(case, images, subject.precision, turns.all_steps, threads)
        workers[subject] = partial(StepWorker, subject.who, config)
    with in_processes(workers, new_process) as blocks, Neighbour() as neighbour:

        def block(subject: Subject) -> Block:
            with neighbour.busy() if subject.threads_beside else nullcontext():
                return blocks[subject](turns.warmup, turns.steps)

        each = {subject: partial(block, subject) for subject in workers}
        return take_turns(each, turns.repetitions, report=lambda what: report(f"{case.backbone}, {what}"))


def fitting_beside() -> int:
    """The number of compute threads that a run chooses beside a busy program."""
    with Neighbour() as neighbour, neighbour.busy(), compute_threads(torch.device("cpu")):
        return torch.get_num_threads()
