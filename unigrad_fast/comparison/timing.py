"""How long members take here, by three steps of each line, measured alone in a process of its own."""

from __future__ import annotations

from functools import partial

from unigrad_fast.benchmarks.harness.processes import in_processes, new_process
from unigrad_fast.benchmarks.harness.run_config import SELDOM, changed, long_enough
from unigrad_fast.benchmarks.measures.step_blocks import StepWorker
from unigrad_fast.config import Config
from unigrad_fast.pipelines import Manifest
from unigrad_fast.training.telemetry.progress import duration

WARMUP, STEPS = 1, 3
WITHOUT = "without starting, evaluating and saving; three steps say little beside other programs"


def seconds(config: Config) -> float:
    """Seconds that all steps of a run take."""
    per_epoch = len(Manifest.open(config.data.train)) // config.data.batch_size
    reports = {"every": SELDOM, "effective_rank_every": SELDOM, "tensorboard": False}
    measured = long_enough(changed(config, {"output": None, "telemetry": reports}), WARMUP + STEPS)
    with in_processes({"": partial(StepWorker, "ours", measured)}, new_process) as blocks:
        speed = blocks[""](WARMUP, STEPS).images_per_s
    return config.schedule.epochs * per_epoch * config.data.batch_size / speed


def spoken(seconds: float) -> str:
    return f"about {duration(seconds)}"
