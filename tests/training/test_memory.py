"""A long run needs no more memory than a short one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from trainer_state import batches, make_trainer, small_config

from unigrad_fast.training.loop import report
from unigrad_fast.training.telemetry import Telemetry

STEPS, SETTLED = 2000, 300


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def train(images: str, output: Path) -> list[int]:
    """Memory every 100 steps of a run with telemetry."""
    config = small_config(images, data__batch_size=4, data__image_size=16, schedule__epochs=STEPS // 24 + 1)
    trainer = make_trainer(config)
    stream, seen = batches(trainer), []
    with Telemetry(output, config, trainer.total_steps, trainer.steps_per_epoch) as telemetry:
        for step in range(STEPS):
            waited = trainer.step(step, stream)
            report(trainer, telemetry, before=step)
            telemetry.advance(step + 1, 4, waited)
            if (step + 1) % 100 == 0:
                seen.append(resident())
    return seen


@pytest.mark.slow
def test_memory_is_flat_over_two_thousand_steps(images, workers, tmp_path, record_property):
    group = workers(1)
    group.timeout = 1200
    (seen,) = group.run(train, str(images), tmp_path)
    settled = seen[SETTLED // 100 - 1]
    growth = (max(seen[-5:]) - settled) / 2**20
    record_property("MiB at step 300", round(settled / 2**20))
    record_property("MiB more at the end", round(growth, 1))
    assert growth < 20
