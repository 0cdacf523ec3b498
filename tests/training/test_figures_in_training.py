"""Runs report the metrics of the paper's figures, in the steps that are due, and train as without them."""

from __future__ import annotations

import math

import pytest
from trainer_state import batches, changed, make_trainer, small_config, state

from unigrad_fast.config import Config
from unigrad_fast.objectives.metrics import names_of
from unigrad_fast.runtime.collectives import CollectiveSpy

STEPS = 4  # of 24: with an interval of 1000 steps only the first is reported


def walked(settings: Config) -> tuple[dict, list[bool], list[dict], list[int]]:
    """The state after some steps, which of them measured, what was reported, and the collectives of each step."""
    trainer = make_trainer(settings, stages=1)
    stream, measured, counts = batches(trainer), [], []
    for step in range(STEPS):
        with CollectiveSpy() as spy:
            trainer.step(step, stream)
        measured.append(trainer.objective.measures)
        counts.append(sum(each.count for each in spy.found.values()))
    return state(trainer), measured, [numbers for _, numbers in trainer.metrics(before=STEPS)], counts


def often_and_seldom(images: str, changes: dict) -> tuple:
    return tuple(walked(small_config(images, telemetry__every=every, **changes)) for every in (1, 1000))


@pytest.mark.parametrize("changes", [{}, {"method": "byol_directpred"}, {"method": "barlow_twins", "form": "original"}])
def test_reports_change_no_bit_of_the_training_and_only_steps_that_are_due_measure(images, workers, changes):
    chosen = {"objective__correlation_source": None} if changes else {}
    chosen |= {f"objective__{key}": value for key, value in changes.items()}
    settings = small_config(str(images), **chosen)
    found = workers(2).run(often_and_seldom, str(images), chosen)
    for often, seldom in found:
        assert changed(often[0], seldom[0]) == {}
        assert often[1] == [True] * STEPS and seldom[1] == [True] + [False] * (STEPS - 1)
        assert len(often[2]) == STEPS and len(seldom[2]) == 1
        # The sums of the feature deviation, which carry those of the figures, and the means over ranks.
        assert [one - other for one, other in zip(often[3], seldom[3], strict=True)] == [0, 2, 2, 2]
        names = {"loss" if name == "objective" else name for name in names_of(settings.objective)}
        for numbers in often[2]:
            assert names <= numbers.keys() and all(math.isfinite(numbers[name]) for name in names)
