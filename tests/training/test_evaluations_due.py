"""When a run judges its encoder."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from unigrad_fast.config import resolve
from unigrad_fast.training.trainer import Trainer


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, [0, 20, 24]),
        ({"at_start": False}, [20, 24]),
        ({"every": 0}, [0, 24]),
        ({"every": 3, "at_start": False}, [6, 12, 18, 24]),
    ],
)
def test_the_encoder_is_judged_at_the_ends_and_in_between_unless_that_is_switched_off(given, expected):
    config = resolve("cifar_subset", {"evaluation": {"every": 10, **given}, "schedule": {"epochs": 12}})
    due = [
        step
        for step in range(25)
        if Trainer.is_evaluation_due(SimpleNamespace(config=config, steps_done=step, steps_per_epoch=2, total_steps=24))
    ]
    assert due == expected
