"""Training with F in shards: as with F on every rank, bit for bit on resume, and from one placement to the other."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from trainer_state import batches, changed, make_trainer, small_config, smooth, state

from unigrad_fast.checkpoints.files import Reader
from unigrad_fast.networks import batch_norm
from unigrad_fast.objectives import UniGrad
from unigrad_fast.runtime.errors import UserError
from unigrad_fast.training import checkpoint

F = "objective.average.correlation"
_trainers: dict = {}  # of a worker process, by placement: building one takes longer than a step


def trainer_at(images: str, output: Path, placement: str):
    if placement not in _trainers:
        changes = {"objective__placement": placement, "data__batch_size": 24, "optimizer__base_lr": 0.4}
        _trainers[placement] = smooth(make_trainer(small_config(images, **changes), stages=1))
    trainer = _trainers[placement]
    trainer.config = trainer.config.model_copy(update={"output": output})
    return trainer


def train(images: str, output: Path, placement: str) -> list[str]:
    """What differs between the third step of an undisturbed run and of one that was resumed before it."""
    trainer, begun = trainer_at(images, output, placement), []
    begin = UniGrad.begin_update
    with (
        mock.patch.object(batch_norm, "is_alone", return_value=False),
        mock.patch.object(UniGrad, "begin_update", lambda self, target: begun.append(1) or begin(self, target)),
    ):
        stream = batches(trainer)
        for step in range(2):
            trainer.step(step, stream)
        checkpoint.save(trainer, {})
        trainer.step(2, stream)
        expected = state(trainer)
        checkpoint.save(trainer, {})
        checkpoint.restore(trainer, Reader(output / "checkpoints/step-00000002"))
        trainer.step(2, batches(trainer, 2))
    assert len(begun) == (4 if placement == "sharded" and not trainer.in_lockstep else 0)
    return [name for names in changed(expected, state(trainer)).values() for name in names]


def read(images: str, source: Path, placement: str) -> tuple[int, Tensor, dict[str, float]]:
    """After loading the checkpoint the first row of F that lies here and these rows; a step later, errors by part."""
    trainer = trainer_at(images, source, placement)
    with mock.patch.object(batch_norm, "is_alone", return_value=False):
        checkpoint.restore(trainer, Reader(source / "checkpoints/step-00000002"))
        average = trainer.objective.average
        rows = average.correlation.clone()
        trainer.step(2, batches(trainer, 2))
    reader, squares = Reader(source / "checkpoints/step-00000003"), defaultdict(lambda: torch.zeros(2).double())
    for fragment in checkpoint.state(trainer):
        ours = fragment.tensor.reshape(-1).double()
        expected = torch.empty_like(fragment.tensor.reshape(-1))
        reader.read(fragment.name, fragment.start, expected)
        part = fragment.name.partition(".")[0]
        squares[part] += torch.stack([(ours - expected).norm(), expected.double().norm()]).square()
    errors = {part: (d / n.clamp_min(1e-6)).sqrt().item() for part, (d, n) in squares.items()}
    return average.first_row, rows, errors


@pytest.mark.parametrize("source", ["sharded", pytest.param("replicated", marks=pytest.mark.slow)])
def test_a_checkpoint_goes_between_placements_and_numbers_of_ranks(images, workers, tmp_path, source):
    for differing in workers(2).run(train, str(images), tmp_path, source):
        assert differing == []
    stored = Reader(tmp_path / "checkpoints/step-00000002").tensor(F)
    assert torch.equal(stored, stored.T) or source == "sharded"
    for ranks, placement in ((1, "replicated"), (2, "replicated"), (2, "sharded"), (3, "sharded")):
        found = workers(ranks).run(read, str(images), tmp_path, placement)
        if placement == "sharded":
            assert [first for first, *_ in found] == [32 * rank // ranks for rank in range(ranks)]
            assert torch.equal(torch.cat([rows for _, rows, _ in found]), stored)
        for _, rows, errors in found:
            if placement == "replicated":
                assert torch.equal(rows, stored.triu() + stored.triu(1).T)
            assert errors.pop("momentum") <= 1e-5 and max(errors.values()) <= 1e-6, errors


def refused(images: str) -> None:
    config = small_config(images, objective__placement="sharded", model__projector={"depth": 3, "width": 1})
    if dist.get_world_size() > 1:
        with pytest.raises(UserError, match="placement = sharded: 2 ranks cannot share 1 rows; use replicated"):
            make_trainer(config, stages=1)


def test_more_ranks_than_rows_are_refused_by_the_key(images, workers):
    workers(2).run(refused, str(images))
