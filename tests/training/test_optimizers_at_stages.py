"""Each optimizer with gradients that are prescribed: at every ZeRO stage and number of ranks it is its formula.

The network's tensors have sizes that no number of ranks divides, so that a rank holds parts of some, all of others and
nothing of the rest; the smallest network leaves a rank with nothing at all.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from trainer_state import batches, changed, make_trainer, small_config, state

from unigrad_fast import config
from unigrad_fast.checkpoints import files
from unigrad_fast.checkpoints.files import Reader, latest
from unigrad_fast.runtime.process_group import World
from unigrad_fast.training import checkpoint
from unigrad_fast.training.engine import build_engine
from unigrad_fast.training.fragments import build_fragments
from unigrad_fast.training.optimizers import build_optimizer
from unigrad_fast.training.reduction import backward, build_reduction

STEPS, SAVED = 12, 6
SPOILED, FLAGGED = 4, 9  # steps in which a gradient has a NaN on one rank, and in which the flag is up before
SIZES = {"some": [(5, 3, 3, 3), (5,), (7, 11), (7,), (1, 3), (1,), (40, 13), (40,)], "least": [(1, 3), (1,)]}
LARS = {"name": "lars", "base_lr": 0.3, "bias_base_lr": 0.05, "weight_decay": 0.1, "exclude_bias_and_norm": True}
CASES = {
    "lars": (LARS, "some", 1),
    "lars, clipped, accumulated": ({**LARS, "clip_norm": 3.0, "trust_coefficient": 0.02}, "some", 2),
    "lars of all": ({**LARS, "exclude_bias_and_norm": False, "bias_base_lr": None, "clip_norm": 3.0}, "some", 1),
    "lars, least": ({**LARS, "clip_norm": 3.0}, "least", 1),
    "adamw": ({**LARS, "name": "adamw", "base_lr": 0.01, "bias_base_lr": 0.02, "clip_norm": 3.0}, "some", 2),
    "sgd": ({**LARS, "name": "sgd", "base_lr": 0.01, "clip_norm": 3.0}, "some", 1),
}
WAYS = [(stage, ranks) for stage in (0, 1, 2) for ranks in (1, 2, 3)]
FEW = [(0, 1), (1, 3), (2, 2)]


def some(full: tuple[str, ...], brief: tuple[str, ...]) -> list:
    """Cases in all ways, of which all but the first are tried in few by default, and further ones in few."""
    chosen = [(case, *way) for cases, ways in ((full, WAYS), (brief, FEW)) for case in cases for way in ways]
    marks = {True: [pytest.mark.slow], False: []}
    return [
        pytest.param(
            *each, id="{}, stage {}, {} ranks".format(*each), marks=marks[each[0] != full[0] and each[1:] not in FEW]
        )
        for each in chosen
    ]


class Prescribed(nn.Module):
    """A network whose gradients are what it is given."""

    def __init__(self, sizes: list[tuple[int, ...]]):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.tensors = nn.ParameterList(nn.Parameter(torch.randn(size, generator=generator)) for size in sizes)

    def forward(self, gradients: list[Tensor]) -> Tensor:
        return sum((tensor * gradient).sum() for tensor, gradient in zip(self.tensors, gradients, strict=True))


def prescribed(sizes: list[tuple[int, ...]], step: int) -> list[Tensor]:
    """Gradients of a step; of one tensor zero in some steps."""
    generator = torch.Generator().manual_seed(100 + step)
    gradients = [torch.randn(size, generator=generator) * 10 ** (n % 3 - 1) for n, size in enumerate(sizes)]
    return [torch.zeros_like(g) if n == 2 and step in (0, 7) else g for n, g in enumerate(gradients)]


def rate(step: int) -> float:
    return (step + 1) / STEPS


def formula(case: str) -> list[Tensor]:
    """The weights after all steps, of one process in float64."""
    settings, which, _ = CASES[case]
    settings = config.Optimizer(**settings)
    weights = [p.detach().double() for p in Prescribed(SIZES[which]).parameters()]
    first, second, done = [torch.zeros_like(w) for w in weights], [torch.zeros_like(w) for w in weights], 0
    for step in range(STEPS):
        if step in (SPOILED, FLAGGED):
            continue
        done += 1
        gradients = [g.double() for g in prescribed(SIZES[which], step)]
        norm = torch.stack([g.norm() for g in gradients]).norm()
        if settings.clip_norm:
            gradients = [g * min(1.0, settings.clip_norm / norm) for g in gradients]
        for w, g, v, s in zip(weights, gradients, first, second, strict=True):
            plain = settings.exclude_bias_and_norm and w.ndim == 1
            decay = 0.0 if plain else settings.weight_decay
            own = settings.bias_base_lr if w.ndim == 1 else None
            lr = rate(step) * (own or settings.base_lr)
            if settings.name == "adamw":
                w.mul_(1 - lr * decay)
                v.lerp_(g, 1 - settings.momentum)
                s.lerp_(g.square(), 1 - settings.second_momentum)
                root = (s / (1 - settings.second_momentum**done)).sqrt() + 1e-8
                w.sub_(lr * v / (1 - settings.momentum**done) / root)
                continue
            update, ratio = g + decay * w, 1.0
            if settings.name == "lars" and not plain and update.any():
                ratio = settings.trust_coefficient * w.norm() / update.norm()
            v.mul_(settings.momentum).add_(ratio * update)
            w.sub_(lr * v)
    return weights


class Run:
    """A run without images: the engine, the optimizer and the fragments, as `checkpoint` wants them."""

    def __init__(self, case: str, stage: int):
        settings, which, accumulation = CASES[case]
        self.sizes, settings = SIZES[which], config.Optimizer(**settings)
        self.base_lr = settings.base_lr
        module = Prescribed(self.sizes)
        self.optimizer = build_optimizer(module, settings)
        engine = config.Engine(zero_stage=stage, accumulation_steps=accumulation)
        self.online = build_engine(module, self.optimizer, settings=engine, micro_batch_size=1, dtype=None)
        self.fragments, self.reduction = build_fragments(self.online, self.optimizer), build_reduction(self.online)
        self.accumulation, self.steps_done, self.loss_scale = accumulation, 0, None
        self.target = self.objective = nn.Module()
        self.target_copies: dict[str, Tensor] = {}
        self.gate = SimpleNamespace(in_a_row=torch.tensor(0), total=torch.tensor(0))

    def step(self) -> None:
        rank, ranks, step = dist.get_rank(), dist.get_world_size(), self.steps_done
        for group in self.optimizer.param_groups:
            group["lr"] = rate(step) * self.base_lr * group["lr_share"]
        self.optimizer.open()
        for number in range(self.accumulation):
            share = 1 + rank - (ranks - 1) / 2 + number - (self.accumulation - 1) / 2  # 1 in the mean
            gradients = [share * g for g in prescribed(self.sizes, step)]
            if step == SPOILED and rank == ranks - 1:
                gradients[0].view(-1)[1] = torch.nan
            if step == FLAGGED:
                self.optimizer.nonfinite.fill_(1)
            backward(self.online, self.online(gradients), self.reduction)
            if self.online.is_gradient_accumulation_boundary():
                self.optimizer.measure(self.fragments.gradients(), self.fragments.sharded)
            self.online.step()
        self.steps_done += 1

    def kept(self) -> list[Tensor]:
        return [*(f.tensor.clone() for f in checkpoint.state(self)), *self.weights()]

    def weights(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.online.module.parameters()]


def walked(case: str, stage: int, folder: Path | None) -> tuple[list[Tensor], list[int]]:
    """The weights after all steps, and the steps that changed nothing; a checkpoint of the way."""
    run, idle = Run(case, stage), []
    rank, ranks = dist.get_rank(), dist.get_world_size()
    while run.steps_done < STEPS:
        before = run.kept()
        run.step()
        if all(map(torch.equal, before, run.kept())):
            idle.append(run.steps_done - 1)
        if folder is not None and run.steps_done == SAVED:
            world = World(rank, ranks, rank, ranks, torch.device("cpu"), "gloo")
            files.write(folder, SAVED, checkpoint._shares(checkpoint.state(run), world), {"epoch": 1}, rank=rank)
    return run.weights(), idle


def resumed(case: str, stage: int, folders: list[Path]) -> list[list[Tensor]]:
    """The weights after all steps from each checkpoint."""
    results = []
    for folder in folders:
        run = Run(case, stage)
        checkpoint.restore(run, Reader(latest(folder)))
        while run.steps_done < STEPS:
            run.step()
        results.append(run.weights())
    return results


def furthest(ours: list[Tensor], expected: list[Tensor]) -> float:
    return max(((o.double() - e).norm() / e.norm()).item() for o, e in zip(ours, expected, strict=True))


@pytest.mark.parametrize(
    ("case", "stage", "ranks"),
    some(("lars, clipped, accumulated", "lars", "adamw"), ("lars of all", "lars, least", "sgd")),
)
def test_twelve_steps_are_those_of_one_process_in_float64(workers, case, stage, ranks):
    expected = formula(case)
    for weights, idle in workers(ranks).run(walked, case, stage, None):
        assert furthest(weights, expected) <= 1e-6
        assert idle == [SPOILED, FLAGGED]


@pytest.fixture(scope="module")
def saved(workers, tmp_path_factory):
    """The folders and final weights of runs that were not disturbed, by case, stage and ranks."""
    results = {}

    def get(case: str, stage: int, ranks: int) -> tuple[Path, list[Tensor]]:
        if (case, stage, ranks) not in results:
            folder = tmp_path_factory.mktemp(f"stage{stage}-ranks{ranks}")
            results[case, stage, ranks] = folder, workers(ranks).run(walked, case, stage, folder)[0][0]
        return results[case, stage, ranks]

    return get


@pytest.mark.parametrize(("case", "stage", "ranks"), some(("lars, clipped, accumulated",), ("lars, least", "adamw")))
def test_a_run_goes_on_from_every_stage_and_number_of_ranks(workers, saved, case, stage, ranks):
    """Where both are the same it goes on bit for bit."""
    expected = formula(case)
    sources = {way: saved(case, *way) for way in {*FEW, (stage, ranks)}}
    results = workers(ranks).run(resumed, case, stage, [folder for folder, _ in sources.values()])
    for weights, (way, (_, undisturbed)) in itertools.chain.from_iterable(
        zip(each, sources.items(), strict=True) for each in results
    ):
        assert furthest(weights, expected) <= 1e-6
        if way == (stage, ranks):
            assert all(map(torch.equal, weights, undisturbed))


def step_twice(images: str, output: Path, name: str, stage: int) -> tuple[dict, set[float]]:
    """What differs between a second step and the same from a checkpoint; the learning rates in it."""
    changes = {"optimizer__name": name, "optimizer__bias_base_lr": 0.05, "optimizer__base_lr": 0.3}
    trainer = make_trainer(small_config(images, engine__zero_stage=stage, **changes), stages=1)
    trainer.config = trainer.config.model_copy(update={"output": output})
    trainer.step(0, batches(trainer, 0))
    checkpoint.save(trainer, {})
    trainer.step(1, batches(trainer, 1))
    first = state(trainer)
    checkpoint.restore(trainer, Reader(latest(output)))
    trainer.step(1, batches(trainer, 1))
    return changed(first, state(trainer)), {
        group["lr"] / trainer.learning_rate(1) for group in trainer.optimizer.param_groups
    }


@pytest.mark.parametrize(("name", "stage"), [("lars", 2), ("adamw", 1)])
def test_a_trainer_takes_them_and_goes_on_bit_for_bit(images, workers, tmp_path, name, stage):
    for differing, rates in workers(2).run(step_twice, str(images), tmp_path, name, stage):
        assert differing == {}
        assert sorted(rates) == pytest.approx([0.05 / 0.3, 1.0])
