"""The number of ranks changes nothing.

In float64 two free runs of a plain loop stay one. In fp32, through the engine, each of 20 steps starts from the
one-rank run's state, since batch norm amplifies rounding and free runs drift apart even when all is right. There
ReLU gives way to SiLU: where an activation lies within rounding of ReLU's kink, the gradient jumps by far more than
rounding (seen in 5 of 20 steps, by up to 3e-3 of a tensor), on any two machines as on any two numbers of ranks. The
one rank takes the synchronised batch norm too: torch's, which it would take, sums in fp32 over all rows at once and
alone moves the gradient by up to 1e-5; `test_sync_batch_norm.py` compares the two.
"""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from trainer_state import batches, make_trainer, restore, small_config, state

from unigrad_fast import sync_batch_norm
from unigrad_fast.config import Config
from unigrad_fast.model import build_encoder
from unigrad_fast.objectives import UniGrad
from unigrad_fast.pipelines import Loader, Manifest
from unigrad_fast.training.optimizers import build_optimizer
from unigrad_fast.training.schedules import learning_rate, target_momentum
from unigrad_fast.training.target import make_target, update_target_
from unigrad_fast.training.trainer import Trainer

STEPS = 20


def plain_loop(images: str) -> list[float]:
    """Losses of 20 free steps in float64: our model, objective, optimizer and target, without the engine."""
    rank, size = dist.get_rank(), dist.get_world_size()
    config = small_config(images)
    encoder = build_encoder(config.model, config.seed, torch.device("cpu")).double()
    target = make_target(encoder)
    optimizer = build_optimizer(encoder, config.optimizer)
    objective = UniGrad(width=32, balance=config.objective.balance, decay=config.objective.decay)
    loader = Loader(Manifest.from_folder(images), batch_size=32, rank=rank, world_size=size, image_size=32, threads=1)
    losses = []
    for step, batch in enumerate(loader.iterate(stop_step=STEPS)):
        views = [view.double() for view in batch.views]
        with torch.no_grad():
            targets = target(views)
        loss = objective(online=encoder(views), target=targets).loss
        optimizer.zero_grad()
        loss.backward()
        for parameter in encoder.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= size
        peak = config.optimizer.base_lr * 32 / 256
        optimizer.param_groups[0]["lr"] = learning_rate(step, STEPS, peak=peak, warmup_steps=3)
        optimizer.step()
        momentum = target_momentum(step + 1, STEPS, initial=0.95, final=1.0)
        update_target_(target, encoder, momentum, skip=optimizer.nonfinite)
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / size)
    return losses


def test_one_and_two_ranks_are_one_run_in_float64(images, workers):
    alone = workers(1).run(plain_loop, str(images))[0]
    together = workers(2).run(plain_loop, str(images))[0]
    assert len(set(alone)) == STEPS
    for one, two in zip(alone, together, strict=True):
        assert abs(one - two) / max(1, abs(one)) <= 1e-7


def smooth(trainer: Trainer) -> Trainer:
    for branch in (trainer.online.module, trainer.target):
        for module in list(branch.modules()):
            for name, child in module.named_children():
                if isinstance(child, nn.ReLU):
                    setattr(module, name, nn.SiLU())
    return trainer


def observe_step(trainer, step: int) -> tuple[float, dict[str, Tensor]]:
    """One step; the loss over all ranks and the gradient that the optimizer was given."""
    gradient = {}

    def keep(*_):
        gradient.update({n: p.grad.clone() for n, p in trainer.online.module.named_parameters()})

    hook = trainer.optimizer.register_step_pre_hook(keep)
    trainer.step(step, batches(trainer, step))
    hook.remove()
    ((_, metrics),) = trainer.metrics(before=step + 1)
    return metrics["loss"], gradient


def record(config: Config, steps: int, folder: str) -> None:
    trainer = smooth(make_trainer(config))
    with mock.patch.object(sync_batch_norm, "is_alone", return_value=False):
        for step in range(steps):
            before = state(trainer)
            loss, gradient = observe_step(trainer, step)
            torch.save({"state": before, "loss": loss, "gradient": gradient}, f"{folder}/{step}.pt")


def compare(config: Config, steps: int, folder: str) -> list[tuple[float, float, float]]:
    """Per step: the loss's difference, the gradient's relative error, and the worst tensor's."""
    trainer = smooth(make_trainer(config))
    errors = []
    for step in range(steps):
        expected = torch.load(f"{folder}/{step}.pt", weights_only=True)
        restore(trainer, expected["state"])
        loss, gradient = observe_step(trainer, step)
        pairs = [(gradient[name], value) for name, value in expected["gradient"].items()]
        norm = torch.stack([value.norm() for _, value in pairs]).norm()
        distance = torch.stack([(ours - value).norm() for ours, value in pairs]).norm()
        # A tensor whose gradient is rounding alone (a bias before a batch norm) has no relative error.
        worst = max(((ours - value).norm() / value.norm().clamp_min(1e-6 * norm)).item() for ours, value in pairs)
        errors.append((abs(loss - expected["loss"]), (distance / norm).item(), worst))
    return errors


@pytest.mark.parametrize(("accumulation_steps", "steps"), [(1, STEPS), (2, 4)])
def test_each_step_through_the_engine_is_the_same_on_one_and_two_ranks(
    images: Path, workers, tmp_path, accumulation_steps, steps
):
    # Micro-batches of 32 images in both cases: batch statistics over fewer amplify rounding.
    changes = {"engine__accumulation_steps": accumulation_steps, "data__batch_size": 32 * accumulation_steps}
    config = small_config(str(images), **changes)
    workers(1).run(record, config, steps, str(tmp_path))
    for loss, gradient, worst in workers(2).run(compare, config, steps, str(tmp_path))[1]:
        assert loss <= 1e-5
        assert gradient <= 1e-5
        assert worst <= 1e-4
