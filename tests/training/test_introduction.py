"""What a run says before its first step."""

from __future__ import annotations

from unittest.mock import MagicMock

import pytest
import torch

from unigrad_fast.config import resolve
from unigrad_fast.runtime.process_group import World
from unigrad_fast.training.telemetry.introduction import introduce


def warnings(ranks: int, device: str, **changes) -> list[str]:
    config = resolve("imagenet_100ep", {"output": "/nowhere", "data": {"train": "/nowhere"}, **changes})
    trainer = MagicMock(config=config, world=World(0, ranks, 0, ranks, torch.device(device), "nccl"), dtype=None)
    trainer.online.module.parameters.return_value = []
    trainer.steps_done, trainer.total_steps, trainer.steps_per_epoch = 0, 10, 10
    trainer.bad_images.told_at_start.return_value = None
    telemetry = MagicMock()
    introduce(telemetry, trainer, MagicMock(has_labels=False, __len__=lambda _: 5000))
    return [call.args[0] for call in telemetry.warn.call_args_list]


def test_more_gpus_than_the_batch_is_worth_are_warned_of_in_one_line():
    (line,) = warnings(32, "cuda")
    assert (
        line.startswith("data.batch_size = 1024: 32 images at once on each of 32 GPUs; below 96") and "\n" not in line
    )
    assert "larger data.batch_size" in line and "accumulation" not in line
    (line,) = warnings(8, "cuda", engine={"accumulation_steps": 2})
    assert "64 images" in line and "smaller engine.accumulation_steps" in line


@pytest.mark.parametrize(
    ("ranks", "device", "images"), [(8, "cuda", 1024), (8, "cuda", 768), (1, "cuda", 32), (32, "cpu", 1024)]
)
def test_enough_images_one_gpu_and_processors_are_not_warned_of(ranks, device, images):
    assert warnings(ranks, device, data={"train": "/nowhere", "batch_size": images}) == []


def test_a_time_out_shorter_than_the_patience_with_storage_is_warned_of():
    data = {"train": "/nowhere", "read_timeout": 60.0}
    (line,) = warnings(8, "cpu", engine={"timeout": 2}, data=data)
    assert line.startswith("engine.timeout = 2 minutes: shorter than a rank may wait for files (240 s by")
    assert "use 4, or a smaller data.read_timeout" in line and "\n" not in line
    assert warnings(8, "cpu", engine={"timeout": 4}, data=data) == []
    assert warnings(1, "cpu", engine={"timeout": 2}, data=data) == []
