"""Measures the data path: every variant in its own process, taking turns block by block; and the memory of ours."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch

from unigrad_fast.benchmarks.harness.memory import give_back_free_memory, process_bytes
from unigrad_fast.benchmarks.harness.processes import cpu_seconds, in_processes, rest
from unigrad_fast.benchmarks.harness.turns import seconds, take_turns
from unigrad_fast.benchmarks.peers.loader import NAMED, Batches, Setting


@dataclass(frozen=True)
class Block:
    """Results of a block of batches: images/s by the wall clock, and processor time per image in ms."""

    images_per_s: float
    cpu_ms: float


class LoaderWorker:
    """A variant in its own process."""

    def __init__(self, variant: Callable[[Setting], Batches], setting: Setting):
        self.setting = setting
        self.batches = variant(setting)
        next(self.batches)
        rest()

    def block(self, steps: int) -> Block:
        """Measure a block of batches; the process is idle before and after it."""
        warmup, batch_size = self.setting.warmup, self.setting.batch_size
        device = torch.device("cuda" if self.setting.device == "gpu" else "cpu")
        before = cpu_seconds()
        for _ in range(warmup):
            next(self.batches)
        each = seconds(lambda: next(self.batches), device, steps)
        rest()
        return Block(batch_size / each, 1000 * (cpu_seconds() - before) / ((warmup + steps) * batch_size))

    def close(self) -> None:
        self.batches.close()


def measure(
    setting: Setting,
    rounds: int,
    steps: int,
    report: Callable[[str], None],
    variants: Mapping[str, Callable[[Setting], Batches]] = NAMED,
) -> dict[str, list[Block]]:
    """The blocks of every variant, one per round."""
    report("starting")
    made = {what: partial(LoaderWorker, variant, setting) for what, variant in variants.items()}
    with in_processes(made, new_process) as blocks:
        return take_turns({what: partial(block, steps) for what, block in blocks.items()}, rounds, report=report)


def measure_memory(setting: Setting, epochs: int) -> list[float]:
    """`resident_after_epochs` in a fresh process."""
    with new_process() as pool:
        return pool.submit(resident_after_epochs, setting, epochs).result()


def resident_after_epochs(setting: Setting, epochs: int) -> list[float]:
    """Memory of this process in MiB after each epoch of our loader, not counting the first epoch."""
    loader = setting.loader()
    batches = loader.iterate()
    resident = []
    for _ in range(1 + epochs):
        for _ in range(loader.steps_per_epoch):
            next(batches)
        give_back_free_memory()
        resident.append(process_bytes("VmRSS") / 2**20)
    loader.close()
    return resident[1:]


def new_process() -> ProcessPoolExecutor:
    """A process forked from one that has only imported this module."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return ProcessPoolExecutor(1, context)
