"""Training with CutMix, multi-crop and growing views: exact on resume; the target sees no mixed and no local view."""

import pytest
import torch
from trainer_state import batches, changed, make_trainer, small_config, state

from unigrad_fast import config
from unigrad_fast.checkpoints.files import Reader, latest
from unigrad_fast.runtime.errors import UserError
from unigrad_fast.training import checkpoint

CUTMIX = {"data__cutmix": {"probability": 1.0, "group": 8}}
MULTICROP = {
    "data__recipe": "multicrop",
    "data__image_size": 32,
    "data__local_crops": 2,
    "data__local_views": {"size": 16},
}
GROWING = {"data__progressive": {"start_size": 16, "epochs": 2}, "data__photometric": "torch"}


def mixing(images, run=None, **further):
    return small_config(str(images), **CUTMIX, **further).model_copy(update={"output": run})


def stopped_and_continued(settings) -> list[dict]:
    """Differences of a run of four steps to one that is stopped after two, and to one without CutMix."""
    whole = make_trainer(settings, stages=1)
    stream = batches(whole)
    for step in range(4):
        if step == 2:
            checkpoint.save(whole, {})
        whole.step(step, stream)
    continued = make_trainer(settings, stages=1)
    checkpoint.restore(continued, Reader(latest(settings.output)))
    stream = batches(continued, 2)
    for step in range(2, 4):
        continued.step(step, stream)
    data = settings.data.model_copy(update={"cutmix": config.CutMixSettings()})
    plain = make_trainer(settings.model_copy(update={"data": data}), stages=1)
    stream = batches(plain)
    for step in range(4):
        plain.step(step, stream)
    return [changed(state(whole), state(other)) for other in (continued, plain)]


@pytest.mark.parametrize(
    "further",
    [{}, pytest.param(MULTICROP, marks=pytest.mark.slow), {**MULTICROP, **GROWING}],
    ids=["alone", "multicrop", "growing"],
)
def test_a_stopped_run_goes_on_bit_for_bit_and_mixing_matters(images, workers, tmp_path, further):
    ((continued, plain),) = workers(1).run(stopped_and_continued, mixing(images, tmp_path, **further))
    assert continued == {}
    assert plain["parameters"]


def what_the_branches_see(settings) -> bool:
    """Whether the target sees the global views as they are, and the online branch them mixed, then the local ones."""
    trainer, seen = make_trainer(settings, stages=1), {}
    for name, branch in (("online", trainer.online.module), ("target", trainer.target)):
        branch.register_forward_pre_hook(lambda module, inputs, name=name: seen.__setitem__(name, inputs[0]))
    batch = next(batches(trainer))
    trainer.gate.open()
    trainer.optimizer.open()
    trainer.phases.start(0)
    trainer.micro_step(batch)
    mixed = [*batch.mix.apply(batch.views[:2]), *batch.views[2:]]
    right = [
        all(map(torch.equal, seen[name], expected)) and len(seen[name]) == len(expected)
        for name, expected in (("target", batch.views[:2]), ("online", mixed))
    ]
    return all(right) and not torch.equal(mixed[0], batch.views[0])


@pytest.mark.parametrize("further", [{}, MULTICROP], ids=["two views", "multicrop"])
def test_the_target_sees_the_global_views_as_they_are(images, workers, further):
    assert workers(1).run(what_the_branches_see, mixing(images, **further)) == [True]


def test_a_correlation_of_mixed_images_is_refused(images):
    with pytest.raises(UserError, match=r"data.cutmix.probability = 1: .*set objective.correlation_source to target"):
        mixing(images, objective__correlation_source="online")
