"""Training in fp16: what an overflow on one rank of two changes, and what a run keeps of its loss scale.

The network is the stem alone, because torch has no fast fp16 convolution for the backward pass on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from test_gate import inf_embedding
from test_step_graph import LAUNCHED, STEPS, unlike, walked, with_graph
from trainer_state import batches, changed, make_trainer, small_config, smooth, state

from unigrad_fast.checkpoints.files import Reader, latest
from unigrad_fast.config import Config
from unigrad_fast.optimization.loss_scale import FIRST, LEAST, MOST, PATIENCE
from unigrad_fast.pipelines import Batch
from unigrad_fast.runtime import precision
from unigrad_fast.training import checkpoint
from unigrad_fast.training.trainer import Trainer

ONLY_F = {"objective": ["average.correlation", "average.updates"]}


def small(images: Path | str, **changes) -> Config:
    return small_config(str(images), **{"engine__precision": "fp16", "data__batch_size": 8, **changes})


def make(config: Config) -> Trainer:
    return make_trainer(config, blocks=1, stages=0)


def overflow(trainer: Trainer, stream: Iterator[Batch]) -> tuple[Iterator[Batch], Callable[[], None]]:
    """A gradient of the first micro-batch leaves the range of fp16 on the last rank."""
    passes: list[None] = []

    def spoil(gradient):
        passes.append(None)
        is_first, is_last_rank = len(passes) == 1, dist.get_rank() == dist.get_world_size() - 1
        return (gradient.half() * torch.inf).float() if is_first and is_last_rank else gradient

    return stream, trainer.online.module.backbone.conv1.weight.register_hook(spoil).remove


def counters(trainer: Trainer) -> tuple[float, int, int]:
    return trainer.loss_scale.value.item(), trainer.gate.in_a_row.item(), trainer.gate.total.item()


def faults(config: Config) -> list:
    """What each spoiled step changes, with the scale, the steps dropped in a row, and those dropped in all after it."""
    trainer, found = make(config), []
    stream = batches(trainer)
    for step, (spoil, scale) in enumerate(
        [(overflow, FIRST), (inf_embedding, FIRST), (overflow, 8.0), (overflow, LEAST)]
    ):
        trainer.loss_scale.value.fill_(scale)
        before = state(trainer)
        spoiled, undo = spoil(trainer, stream)
        trainer.step(step, spoiled)
        undo()
        found.append((changed(before, state(trainer)), counters(trainer)))
    trainer.loss_scale.good_steps.fill_(PATIENCE - 1)
    before = state(trainer)
    trainer.step(len(found), stream)
    found.append((changed(before, state(trainer)).keys() >= {"parameters", "target_parameters"}, counters(trainer)))
    return found


@pytest.mark.parametrize(("stage", "accumulation"), [(0, 2), (2, 1)])
def test_only_an_overflow_that_no_lower_scale_answers_is_a_dropped_step(images, workers, stage, accumulation):
    changes = {"engine__zero_stage": stage, "engine__accumulation_steps": accumulation}
    for found in workers(2).run(faults, small(images, **changes, data__batch_size=16)):
        assert found == [
            (ONLY_F, (FIRST / 2, 0, 0)),  # of all micro-batches, and on both ranks
            (ONLY_F, (FIRST, 1, 1)),  # a forward pass
            (ONLY_F, (4.0, 1, 1)),  # neither counts nor ends the row
            (ONLY_F, (LEAST, 2, 2)),
            (True, (2 * LEAST, 0, 2)),
        ]


def resumed(config: Config) -> tuple[dict, list[float]]:
    """What differs three steps after a checkpoint, between the run that wrote it and one that read it; their scales."""
    trainers = first, second = make(config), make(config)
    first.loss_scale.value.fill_(256.0)
    stream = batches(first)
    _, undo = overflow(first, stream)
    first.step(0, stream)
    undo()
    first.loss_scale.good_steps.fill_(PATIENCE - 2)
    checkpoint.save(first, {})
    checkpoint.restore(second, Reader(latest(config.output)))
    for trainer in trainers:
        stream = batches(trainer, 1)
        for step in range(1, 4):
            trainer.step(step, stream)
    return changed(*map(state, trainers)), [trainer.loss_scale.value.item() for trainer in trainers]


def test_a_resumed_run_has_the_scale_of_the_one_that_stopped_and_goes_on_bit_for_bit(images, workers, tmp_path):
    config = small(images).model_copy(update={"output": tmp_path})
    assert workers(1).run(resumed, config) == [({}, [256.0, 256.0])]  # halved before, doubled after


def from_fp32(config: Config) -> tuple[int, float]:
    """Steps done, and the scale, of a run that goes on from a checkpoint without one."""
    engine = config.engine.model_copy(update={"precision": "fp32"})
    checkpoint.save(make(config.model_copy(update={"engine": engine})), {})
    trainer = make(config)
    trainer.steps_done, trainer.loss_scale.value[...] = 7, 2.0
    checkpoint.restore(trainer, Reader(latest(config.output)))
    return trainer.steps_done, trainer.loss_scale.value.item()


def test_a_checkpoint_without_a_scale_is_one_that_another_card_wrote(images, workers, tmp_path):
    """`auto` chooses the precision anew on each machine."""
    config = small(images).model_copy(update={"output": tmp_path})
    assert workers(1).run(from_fp32, config) == [(0, 2.0)]


def both_ways(config: Config) -> tuple[list, int, list[float]]:
    """What differs between launched and replayed steps, steps dropped, and the final scales."""
    trainers = make(config), make(config)
    for trainer in trainers:
        trainer.loss_scale.value.fill_(MOST)  # much too high
    launched, replayed = walked(trainers[0]), walked(with_graph(trainers[1]))
    return unlike(launched, replayed), launched[3], [trainer.loss_scale.value.item() for trainer in trainers]


def test_a_scale_that_is_too_high_comes_down_in_replayed_steps_too(images, workers):
    """Not in the one step with an image that is NaN, which is the only one that counts as dropped."""
    assert STEPS - 1 > LAUNCHED
    assert workers(1).run(both_ways, small(images)) == [([], 1, [MOST / 2 ** (STEPS - 1)] * 2)]


def gradient(config: Config) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """The first step's gradient by parameter, from the momentum; and its metrics."""
    trainer = smooth(make(config))  # ReLU's kink turns rounding into jumps
    trainer.step(0, batches(trainer))
    ((_, metrics),) = trainer.metrics(before=1)
    return state(trainer)["momentum"], metrics


def test_the_gradient_is_that_of_fp32_to_the_rounding_of_fp16(images, workers):
    ((half, metrics),) = workers(1).run(gradient, small(images))
    ((full, of_full),) = workers(1).run(gradient, small(images, engine__precision="fp32"))
    distance = torch.stack([(half[name] - full[name]).norm() for name in full]).norm()
    # Some twenty roundings of 2⁻¹¹ lie between an image and its gradient.
    assert distance <= 20 * 2**-11 * torch.stack([full[name].norm() for name in full]).norm()
    assert metrics["gradient_norm"] == pytest.approx(of_full["gradient_norm"], rel=20 * 2**-11)
    assert metrics["loss_scale"] == FIRST and "loss_scale" not in of_full


@pytest.mark.parametrize(
    ("device", "has_bf16", "dtype"),
    [
        ("cuda", True, torch.bfloat16),
        ("cuda", False, torch.float16),
        ("cpu", True, torch.bfloat16),
        ("cpu", False, None),
    ],
)
def test_auto_takes_fp16_on_a_gpu_without_bf16_alone(monkeypatch, device, has_bf16, dtype):
    monkeypatch.setattr(precision, "has_fast_bf16", lambda device: has_bf16)
    assert precision.autocast_dtype("auto", torch.device(device)) is dtype
