"""What may change when a run is continued."""

from unigrad_fast.config import resolve
from unigrad_fast.training.same_run import contradictions


def test_only_what_decides_the_result_forbids_to_go_on():
    began = resolve().model_dump(mode="json")
    harmless = {
        "output": "/elsewhere",
        "data": {"train": "/moved", "val": "/moved/val", "threads": 3, "decode": "cpu"},
        "engine": {"zero_stage": 2, "max_skipped_steps": 5},
        "checkpoint": {"every": 0.5, "keep": 7, "keep_every": 10},
        "evaluation": {"every": 3, "knn": {"k": 5}},
        "telemetry": {"every": 1, "tensorboard": False},
    }
    assert contradictions(resolve(overrides=harmless), began, "the checkpoint") == []
    changed = {"seed": 3, "schedule": {"epochs": 200}, "model": {"projector": {"width": 4096}}}
    assert contradictions(resolve(overrides=changed), began, "the checkpoint") == [
        "seed = 3: the checkpoint has 0",
        "model.projector.width = 4096: the checkpoint has 2048",
        "schedule.epochs = 200: the checkpoint has 100",
    ]
