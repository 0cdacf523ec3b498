"""One rank of a run with LARS, ZeRO stage 2 and a sharded F is killed; the run goes on, there and on other ranks."""

from __future__ import annotations

import random
from collections import defaultdict
from pathlib import Path
from unittest import mock

import pytest
import torch
from drawn_images import draw_tree
from interrupted_run import EVERY_STEP, RECIPE, Run, disturb, losses, require_equal, steps_logged
from thin import smoothed
from trainer_state import batches, make_trainer, smooth

from unigrad_fast.checkpoints.files import Reader
from unigrad_fast.config import resolve
from unigrad_fast.networks import batch_norm
from unigrad_fast.runtime.run_folder import RunFolder
from unigrad_fast.training import checkpoint

STEPS_PER_EPOCH = 4
SETTINGS = {
    "optimizer.name": "lars",
    "optimizer.base_lr": "0.3",
    "optimizer.bias_base_lr": "0.05",
    "engine.zero_stage": "2",
    "objective.placement": "sharded",
}
ARGUMENTS = [word for key, value in SETTINGS.items() for word in (f"--{key}", value)]


def go_on(run: Path, stage: int, placement: str) -> dict[str, float]:
    """Errors by part, one step after the last checkpoint but one, against the last."""
    before, after = map(Reader, RunFolder(run).complete_checkpoints()[-2:])
    config = resolve(run / "config.yaml", {"engine": {"zero_stage": stage}, "objective": {"placement": placement}})
    trainer = smooth(make_trainer(config))
    with mock.patch.object(batch_norm, "is_alone", return_value=False):
        checkpoint.restore(trainer, before)
        trainer.step(trainer.steps_done, batches(trainer, trainer.steps_done))
    assert trainer.steps_done == after.about["step"]
    squares = defaultdict(lambda: torch.zeros(2).double())
    for fragment in checkpoint.state(trainer):
        ours = fragment.tensor.reshape(-1).double()
        expected = torch.empty_like(fragment.tensor.reshape(-1))
        after.read(fragment.name, fragment.start, expected)
        part = fragment.name.partition(".")[0]
        squares[part] += torch.stack([(ours - expected).norm(), expected.double().norm()]).square()
    return {part: (d / n.clamp_min(1e-6)).sqrt().item() for part, (d, n) in squares.items()}


@pytest.mark.slow  # tests/training/test_interruption.py kills runs with SGD at stage 0
@pytest.mark.timeout(3600)
def test_a_run_whose_ranks_are_killed_twenty_times_ends_as_if_not_and_goes_on_elsewhere(
    workers, tmp_path, record_property
):
    kills, epochs = 20, 40
    moves = [(3, 1, "replicated"), (1, 0, "replicated"), (3, 0, "sharded"), (4, 2, "sharded")]
    draw_tree(tmp_path / "train", per_class=48)
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(batch=24, epochs=epochs))
    output, undisturbed, steps = tmp_path / "run", tmp_path / "undisturbed", epochs * STEPS_PER_EPOCH

    def start(*more: str, at: Path = output) -> Run:
        return Run(tmp_path, at, 2, *ARGUMENTS, *more, inside=[smoothed])

    statuses, said = start(at=undisturbed).end()
    assert statuses == [0, 0], said
    in_a_save = disturb(lambda: start(*EVERY_STEP), output, random.Random(0), kills, one=True, longest=0.2)
    assert in_a_save >= kills // 3 and 0 < steps_logged(output) < steps
    statuses, said = start(*EVERY_STEP).end()
    assert statuses == [0, 0] and "resuming after step" in said, said
    assert "Warning" not in said
    require_equal(output, undisturbed, steps)
    assert len(losses(output)) == steps
    for ranks, stage, placement in moves:
        for errors in workers(ranks).run(go_on, output, stage, placement):
            assert errors.pop("momentum") <= 1e-5 and max(errors.values()) <= 1e-6, errors
    record_property("kills while it saved", in_a_save)
