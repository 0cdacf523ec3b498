"""The number of ranks changes nothing, nor does the ZeRO stage.

In float64 two free runs of a plain loop stay one. In fp32, through the engine, each step starts from the state
of a run with one rank at stage 0, since batch norm amplifies rounding and free runs drift apart even when all is
right. There ReLU gives way to SiLU: where an activation lies within rounding of ReLU's kink, the gradient jumps by far
more than rounding (seen in 5 of 20 steps, by up to 3e-3 of a tensor), on any two machines as on any two numbers of
ranks. The one rank takes the synchronised batch norm too: torch's, which it would take, sums in fp32 over all rows at
once and alone moves the gradient by up to 1e-5; `tests/networks/test_batch_norm.py` compares the two.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from thin import thin
from torch import Tensor
from trainer_state import batches, make_trainer, small_config, smooth

from unigrad_fast.checkpoints.files import Reader
from unigrad_fast.config import Config
from unigrad_fast.networks import batch_norm
from unigrad_fast.networks.encoder import build_encoder
from unigrad_fast.objectives import UniGrad
from unigrad_fast.optimization.schedules import learning_rate, target_momentum
from unigrad_fast.pipelines import Batch, Manifest
from unigrad_fast.runtime.process_group import World
from unigrad_fast.training import checkpoint
from unigrad_fast.training.optimizers import build_optimizer
from unigrad_fast.training.target import make_target, update_target_
from unigrad_fast.training.trainer import Trainer, build_loader

STEPS = 5  # into a second epoch

MULTICROP_AND_CUTMIX = {
    "data__recipe": "multicrop",
    "data__image_size": 32,
    "data__local_crops": 2,
    "data__local_views": {"size": 16},
    "data__cutmix": {"probability": 1.0, "group": 8},
}


def plain_loop(config: Config) -> list[float]:
    """Losses of free steps in float64: our model, objective, optimizer and target, without the engine."""
    rank, size = dist.get_rank(), dist.get_world_size()
    with thin():
        encoder = build_encoder(config.model, config.seed, torch.device("cpu")).double()
    target = make_target(encoder)
    optimizer = build_optimizer(encoder, config.optimizer)
    objective = UniGrad(width=32, balance=config.objective.balance, decay=config.objective.decay)
    world = World(rank, size, rank, size, torch.device("cpu"), "gloo")
    loader = build_loader(config, world, Manifest.open(config.data.train), {})
    losses = []
    for step, batch in enumerate(loader.iterate(stop_step=STEPS)):
        views = [view.double() for view in batch.views]
        with torch.no_grad():
            targets = target(views[:2])
        if batch.mix is not None:
            views = [*batch.mix.apply(views[:2]), *views[2:]]
        loss = objective(online=encoder(views), target=targets, mix=batch.mix).loss
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


@pytest.mark.parametrize("further", [{}, MULTICROP_AND_CUTMIX], ids=["two views", "multicrop and cutmix"])
def test_one_and_two_ranks_are_one_run_in_float64(images, workers, further):
    config = small_config(str(images), **further)
    alone = workers(1).run(plain_loop, config)[0]
    together = workers(2).run(plain_loop, config)[0]
    assert len(set(alone)) == STEPS
    for one, two in zip(alone, together, strict=True):
        assert abs(one - two) / max(1, abs(one)) <= 1e-7


def momentum(trainer: Trainer) -> dict[str, Tensor]:
    """The optimizer's velocity by parameter, whole on every rank, in float64."""
    shapes = [p.numel() for _, p in trainer.fragments.named]
    flat = torch.zeros(sum(shapes))  # each element is held by one rank, so that adding in fp32 is exact
    whole = {name: values for (name, _), values in zip(trainer.fragments.named, flat.split(shapes), strict=True)}
    for f in trainer.fragments.kept("momentum"):
        whole[f.name][f.start : f.start + f.tensor.numel()] = f.tensor.reshape(-1)
    if trainer.fragments.sharded:
        dist.all_reduce(flat)
    return {name: values.double() for name, values in whole.items()}


def loss_and_gradient(trainer: Trainer, step: int, stream: Iterator[Batch]) -> tuple[float, dict[str, Tensor]]:
    """One step; the gradient with its weight decay is what the velocity gained."""
    before = momentum(trainer)
    trainer.step(step, stream)
    ((_, metrics),) = trainer.metrics(before=step + 1)
    decay = trainer.config.optimizer.momentum
    return metrics["loss"], {name: after - decay * before[name] for name, after in momentum(trainer).items()}


def record(config, steps: int, folder: str) -> None:
    """A run at stage 0, with a checkpoint before every step."""
    with mock.patch.object(batch_norm, "is_alone", return_value=False):
        trainer = smooth(make_trainer(config))
        stream = batches(trainer)
        for step in range(steps):
            checkpoint.save(trainer, {})
            loss, gradient = loss_and_gradient(trainer, step, stream)
            if dist.get_rank() == 0:
                torch.save({"loss": loss, "gradient": gradient}, f"{folder}/{step}.pt")


def compare(config, steps: int, folder: str) -> list[tuple[float, float, float]]:
    """Per step from the recorded state: difference of the loss, error of the gradient, and of its worst tensor."""
    errors = []
    with mock.patch.object(batch_norm, "is_alone", return_value=False):
        trainer = smooth(make_trainer(config))
        stream = batches(trainer)
        for step in range(steps):
            checkpoint.restore(trainer, Reader(config.output / f"checkpoints/step-{step:08}"))
            expected = torch.load(f"{folder}/{step}.pt", weights_only=True)
            loss, gradient = loss_and_gradient(trainer, step, stream)
            pairs = [(gradient[name], value) for name, value in expected["gradient"].items()]
            norm = torch.stack([value.norm() for _, value in pairs]).norm()
            distance = torch.stack([(ours - value).norm() for ours, value in pairs]).norm()
            worst = max(((ours - value).norm() / value.norm().clamp_min(1e-6 * norm)).item() for ours, value in pairs)
            errors.append((abs(loss - expected["loss"]), (distance / norm).item(), worst))
    return errors


def config_at(
    images: Path, run: Path, stage: int, precision: str = "fp32", accumulation_steps: int = 1, **further
) -> Config:
    # Micro-batches of 32 images in all cases: batch statistics over fewer amplify rounding.
    changes = {
        "data__batch_size": 32 * accumulation_steps,
        "engine__accumulation_steps": accumulation_steps,
        "engine__zero_stage": stage,
        "engine__precision": precision,
        "checkpoint__keep": STEPS,
        **further,
    }
    return small_config(str(images), **changes).model_copy(update={"output": run})


@pytest.fixture(scope="module")
def recorded(images, workers, tmp_path_factory) -> Path:
    """The steps of one rank at stage 0, in fp32."""
    folder = tmp_path_factory.mktemp("recorded")
    workers(1).run(record, config_at(images, folder, 0), STEPS, str(folder))
    return folder


@pytest.fixture(scope="module")
def recorded_with_accumulation(images, workers, tmp_path_factory) -> Path:
    """2 steps of one rank at stage 0, of two micro-batches each."""
    folder = tmp_path_factory.mktemp("accumulation")
    workers(1).run(record, config_at(images, folder, 0, accumulation_steps=2), 2, str(folder))
    return folder


TWO_GROUPS = {"optimizer__clip_norm": 0.05, "optimizer__exclude_bias_and_norm": True, "optimizer__weight_decay": 0.1}


@pytest.fixture(scope="module")
def recorded_with_two_groups(images, workers, tmp_path_factory) -> Path:
    """3 steps of one rank at stage 0, clipped, with weight decay for the matrices alone."""
    folder = tmp_path_factory.mktemp("groups")
    workers(1).run(record, config_at(images, folder, 0, **TWO_GROUPS), 3, str(folder))
    return folder


@pytest.fixture(scope="module")
def recorded_in_bf16(images, workers, tmp_path_factory) -> Path:
    """A step of two ranks at stage 0."""
    folder = tmp_path_factory.mktemp("bf16")
    workers(2).run(record, config_at(images, folder, 0, "bf16", data__image_size=32), 1, str(folder))
    return folder


@pytest.mark.parametrize(
    ("stage", "ranks"),
    [
        (0, 1),
        (0, 2),
        (1, 2),
        (2, 2),
        pytest.param(1, 1, marks=pytest.mark.slow),  # with one rank there is nothing to share
        pytest.param(2, 1, marks=pytest.mark.slow),
    ],
)
def test_each_step_in_fp32_is_the_same_at_every_stage(images, workers, recorded, stage, ranks):
    for loss, gradient, worst in workers(ranks).run(compare, config_at(images, recorded, stage), STEPS, str(recorded))[
        -1
    ]:
        assert loss <= 1e-5
        assert gradient <= 1e-5
        assert worst <= 1e-4


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.slow), 2])
def test_each_step_with_accumulation_is_the_same_at_every_stage(images, workers, recorded_with_accumulation, stage):
    folder = recorded_with_accumulation
    config = config_at(images, folder, stage, accumulation_steps=2)
    for loss, gradient, worst in workers(2).run(compare, config, 2, str(folder))[-1]:
        assert loss <= 1e-5
        assert gradient <= 1e-5
        assert worst <= 1e-4


def test_each_step_with_multicrop_and_cutmix_is_the_same_on_two_ranks(images, workers, tmp_path):
    config = config_at(images, tmp_path, 0, **MULTICROP_AND_CUTMIX)
    workers(1).run(record, config, 2, str(tmp_path))
    for loss, gradient, worst in workers(2).run(compare, config, 2, str(tmp_path))[0]:
        assert loss <= 1e-5
        assert gradient <= 1e-5
        assert worst <= 1e-4


@pytest.mark.parametrize("stage", [1, 2])
def test_clipping_and_two_groups_of_weights_are_the_same_at_every_stage(
    images, workers, recorded_with_two_groups, stage
):
    """The norm is that of all groups on all ranks, and each group has its own weight decay."""
    folder = recorded_with_two_groups
    gradient = torch.load(folder / "2.pt", weights_only=True)["gradient"]
    biases = torch.stack([v.norm() for name, v in gradient.items() if "bn" in name]).norm()
    assert biases < 0.05  # clipped, and without decay
    config = config_at(images, folder, stage, **TWO_GROUPS)
    for loss, error, worst in workers(2).run(compare, config, 3, str(folder))[1]:
        assert loss <= 1e-5
        assert error <= 1e-5
        assert worst <= 1e-4


def reduced_in_bf16(config, folder: str) -> tuple[float, float]:
    """Error of a step's gradient against stage 0, and what rounding that gradient to bf16 would cost."""
    ((_, gradient, _),) = compare(config, 1, folder)
    expected = torch.load(f"{folder}/0.pt", weights_only=True)["gradient"].values()
    rounded = [value.bfloat16().double() - value for value in expected]
    cost = torch.stack([r.norm() for r in rounded]).norm() / torch.stack([v.norm() for v in expected]).norm()
    return gradient, cost.item()


@pytest.mark.parametrize("stage", [1, 2])
def test_gradients_of_a_step_in_bf16_are_reduced_in_fp32(images, workers, recorded_in_bf16, stage):
    config = config_at(images, recorded_in_bf16, stage, "bf16", data__image_size=32)
    for gradient, cost in workers(2).run(reduced_in_bf16, config, str(recorded_in_bf16)):
        assert cost > 1e-3
        assert gradient <= 1e-5
