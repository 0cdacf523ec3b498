"""Measures training steps on several ranks of this machine, with F replicated and sharded, in turns."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch

from unigrad_fast.benchmarks.harness.memory import process_bytes
from unigrad_fast.benchmarks.harness.processes import in_processes, new_process, results
from unigrad_fast.benchmarks.harness.run_config import SELDOM, changed, long_enough
from unigrad_fast.benchmarks.harness.turns import Turns, seconds, take_turns
from unigrad_fast.benchmarks.measures.step_blocks import StepWorker
from unigrad_fast.config import Config
from unigrad_fast.runtime.collectives import CollectiveSpy, Sum


@dataclass(frozen=True)
class RankBlock:
    """A block of steps on a rank: seconds per step, peak bytes so far, collectives of one step."""

    seconds: float
    peak: int
    collectives: dict[str, Sum]


class RankWorker(StepWorker):
    """A rank of a run, in its own process.

    Args:
        launch: environment variables that a launcher would set.
    """

    def __init__(self, config: Config, launch: Mapping[str, str]):
        os.environ.update(launch)
        import unigrad_fast.training.trainer  # noqa: F401  # now, so that `before` includes its libraries

        self.before = process_bytes("VmRSS")
        super().__init__("ours", config)

    def block(self, warmup: int, steps: int) -> RankBlock:
        """Measures a block of steps, and counts the collectives of one more; all ranks call it together."""
        try:
            for _ in range(warmup):
                self.variant.step()
            each = seconds(self.variant.step, self.device, steps)
            with CollectiveSpy() as spy:
                self.variant.step()
        except BaseException:
            self.session.close()  # otherwise the others would wait for this rank
            raise
        held = 0 if self.device.type == "cuda" else self.before
        block = RankBlock(each, self.peak() - held, dict(spy.found))
        self.come_to_rest()
        return block


def placements(ranks: int) -> tuple[str, ...]:
    """The placements of F that differ; a single rank always holds all of F."""
    return ("replicated", "sharded") if ranks > 1 else ("replicated",)


def configure(config: Config, ranks: int, images: int, placement: str) -> Config:
    """The configuration with so many images per rank, and without reports, because only some steps make collectives
    for them.

    If there are fewer GPUs than ranks, all ranks use the CPU.
    """
    engine = {"threads": config.engine.threads or max(1, torch.get_num_threads() // ranks)}
    changes = {
        "output": None,
        "engine": engine | ({"device": "cpu"} if torch.cuda.device_count() < ranks else {}),
        "data": {"batch_size": ranks * images * config.engine.accumulation_steps},
        "objective": {"placement": placement},
        "telemetry": {"every": SELDOM, "tensorboard": False},
    }
    return changed(config, changes)


def measure(
    config: Config, ranks: int, images: int, turns: Turns, report: Callable[[str], object]
) -> dict[str, list[list[RankBlock]]]:
    """By placement of F, the blocks of each round, one per rank."""
    workers = {}
    for placement in placements(ranks):
        chosen = long_enough(configure(config, ranks, images, placement), turns.all_steps + turns.repetitions)
        port = _free_port()
        for rank in range(ranks):
            workers[placement, rank] = partial(RankWorker, chosen, _launch(rank, ranks, port))
    with in_processes(workers, new_process) as blocks, ThreadPoolExecutor(ranks) as threads:

        def together(placement: str) -> list[RankBlock]:
            each = [blocks[placement, rank] for rank in range(ranks)]
            return results([threads.submit(block, turns.warmup, turns.steps) for block in each])

        each = {placement: partial(together, placement) for placement in placements(ranks)}
        return take_turns(each, turns.repetitions, report=lambda what: report(f"{ranks} ranks, {what}"))


def _launch(rank: int, ranks: int, port: int) -> dict[str, str]:
    """The environment of a rank."""
    variables: dict[str, object] = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return {name: str(value) for name, value in variables.items()}


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
