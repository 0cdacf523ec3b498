"""A step that meets a non-finite value, on one rank of two, leaves no trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from trainer_state import batches, changed, make_trainer, small_config, state

from unigrad_fast.checkpoints.files import latest
from unigrad_fast.pipelines import Batch
from unigrad_fast.runtime.errors import RunStopped
from unigrad_fast.training.gate import FlatBuffers
from unigrad_fast.training.loop import report


def nan_image(trainer, stream: Iterator[Batch]) -> tuple[Iterator[Batch], Callable[[], None]]:
    batch = next(stream)
    if dist.get_rank() == 1:
        batch.views[0] = batch.views[0].clone()
        batch.views[0][0, 1, 5, 5] = torch.nan
    return iter([batch]), lambda: None


def inf_embedding(trainer, stream: Iterator[Batch]) -> tuple[Iterator[Batch], Callable[[], None]]:
    def spoil(module, inputs, output):
        if dist.get_rank() == 1:
            output = output.clone()
            output[2, 3] = torch.inf
        return output

    return stream, trainer.online.module.projector[-1].register_forward_hook(spoil).remove


def nan_gradient(trainer, stream: Iterator[Batch]) -> tuple[Iterator[Batch], Callable[[], None]]:
    def spoil(gradient):
        return gradient * torch.nan if dist.get_rank() == 1 else gradient

    return stream, trainer.online.module.backbone.layer2[0].conv1.weight.register_hook(spoil).remove


FAULTS = {"a NaN image": nan_image, "an inf embedding": inf_embedding, "a NaN gradient": nan_gradient}


def step_with_fault(images: str, fault: str, clean_steps: int, stage: int) -> dict[str, list[str]]:
    """What a spoiled step changes, after some clean ones; then a clean step must go on as if it had not been."""
    trainer = make_trainer(small_config(images, engine__zero_stage=stage))
    stream = batches(trainer)
    for step in range(clean_steps):
        trainer.step(step, stream)
    before = state(trainer)
    spoiled, undo = FAULTS[fault](trainer, stream)
    trainer.step(clean_steps, spoiled)
    undo()
    after = state(trainer)
    assert trainer.gate.check(before=clean_steps + 1) == 1
    trainer.step(clean_steps + 1, stream)
    assert all(torch.isfinite(t).all() for part in state(trainer).values() for t in part.values())
    assert trainer.gate.check(before=clean_steps + 2) == 1
    assert {"parameters", "weights", "buffers", "momentum", "target_buffers"} <= changed(after, state(trainer)).keys()
    return changed(before, after)


@pytest.mark.parametrize(("clean_steps", "stage"), [(0, 0), (2, 0), (0, 1), (2, 2)])
@pytest.mark.parametrize("fault", FAULTS)
def test_nothing_changes_that_should_not(images, workers, fault, clean_steps, stage):
    for differing in workers(2).run(step_with_fault, str(images), fault, clean_steps, stage):
        if fault == "a NaN image":  # the target branch saw it too
            assert differing == {}
        else:  # the targets are finite, and F keeps them
            assert differing == {"objective": ["average.correlation", "average.updates"]}


def accumulate_with_fault(images: str) -> dict[str, list[str]]:
    trainer = make_trainer(small_config(images, engine__accumulation_steps=2))
    stream = batches(trainer)
    trainer.step(0, stream)
    before = state(trainer)
    first = next(stream)
    if dist.get_rank() == 0:
        first.views[1] = first.views[1] * torch.nan
    trainer.step(1, iter([first, next(stream)]))
    return changed(before, state(trainer))


def test_a_fault_in_one_micro_batch_drops_the_whole_step(images, workers):
    expected = {"objective": ["average.correlation", "average.updates"]}
    assert workers(2).run(accumulate_with_fault, str(images)) == [expected] * 2


def run_of_faults(images: str, output: str) -> str:
    config = small_config(images, engine__max_skipped_steps=3).model_copy(update={"output": output})
    trainer = make_trainer(config)
    stream = batches(trainer)

    class Silent:
        def log_train(self, *_):
            pass

        def progress_so_far(self):
            return {}

        def saved(self, *_):
            pass

    for step in range(10):
        spoiled, _ = nan_image(trainer, stream)
        trainer.step(step, spoiled)
        try:
            report(trainer, Silent(), before=step)
        except RunStopped as stopped:
            return f"{step}: {stopped}"
    return "not stopped"


def test_steps_dropped_in_a_row_stop_the_run_with_a_checkpoint(images, workers, tmp_path):
    for message in workers(2).run(run_of_faults, str(images), tmp_path):
        assert message.startswith("3: step 3: 3 steps in a row had NaN or infinite values")
    assert latest(tmp_path).name == "step-00000004"


def test_buffers_in_one_tensor_stay_the_modules_buffers():
    module = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(5))
    names = list(module.state_dict())
    flat = FlatBuffers(module)
    assert list(module.state_dict()) == names
    flat.keep()
    module[0](torch.randn(4, 3))
    assert module[0].num_batches_tracked == 1 and module[0].running_mean.any()
    flat.restore_where(torch.tensor(0.0))
    assert module[0].num_batches_tracked == 1 and module[0].running_mean.any()
    flat.restore_where(torch.tensor(1.0))
    assert module[0].num_batches_tracked == 0 and not module[0].running_mean.any()
