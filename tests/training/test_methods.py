"""Every method trains: with each target branch, at ZeRO stages 0 and 2, on two ranks; and goes on from a checkpoint."""

from __future__ import annotations

import itertools
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from trainer_state import batches, changed, make_trainer, small_config, state

from unigrad_fast.checkpoints.files import Reader
from unigrad_fast.config import Config
from unigrad_fast.networks.encoder import Encoder
from unigrad_fast.objectives.catalogue import FORMS
from unigrad_fast.training import checkpoint
from unigrad_fast.training.trainer import Trainer

FILLED, STEPS = 2, 5  # steps that fill the state at a hundredth of the learning rate, and those that train
CUTMIX = {"data__cutmix": {"probability": 1.0, "group": 8}}
ORIGINAL = "original "
METHOD = {named: form.names["method"] for named, form in FORMS.items()}


def targets(named: str) -> list[str]:
    """The target branches that a form may have."""
    return [each for each in ("momentum", "stop_gradient", "weight_sharing") if each not in FORMS[named].refused]


MATRIX = [(named, target, stage) for named in METHOD for target in targets(named) for stage in (0, 2)]
# Each form once, with branches and stages in turn; but for rows that are a method's gradient form themselves.
DISTINCT = [named for named in METHOD if named not in ("a", "c", "e", "h", "j")]
COVERING = [
    (named, targets(named)[number % len(targets(named))], (0, 2)[number // 2 % 2])
    for number, named in enumerate(DISTINCT)
]


def config_of(images: str, named: str, target: str | None = None, **overrides) -> Config:
    """A form by its name in the catalogue, with few samples and prototypes, and nothing that waits for an epoch."""
    which = {"row": named} if len(named) == 1 else {"method": METHOD[named]}
    if ORIGINAL in named:
        which["form"] = "original"
    objective = {**which, "target": target}
    small = {"bank_size": 64, "queue_size": 64, "prototypes": 24, "freeze_epochs": 0.0, "queue_start_epoch": 0.0}
    objective |= {key: value for key, value in small.items() if key in FORMS[named].model_fields}
    given = {f"objective__{key}": value for key, value in {"correlation_source": None, **objective}.items()}
    return small_config(images, **{"optimizer__base_lr": 0.4, **given, **overrides})


def made(config: Config) -> Trainer:
    """A trainer whose backbone is a stem alone."""
    return make_trainer(config, blocks=0)


def judged(trainer: Trainer, batch) -> float:
    """The objective of a batch over all ranks, with the state as it is; leaves no trace."""
    trainer.gate.open()
    trainer.objective.eval()
    with torch.no_grad():
        online = trainer.branch.encoder(batch.views)
        target = trainer.branch.embed(batch.views[:2], is_mixed=False)
        output = trainer.objective(online=online, target=online[:2] if target is None else target)
    trainer.objective.train()
    trainer.gate.undo()
    loss = output.loss.detach().clone()
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def trained(config: Config) -> tuple[float, float, bool]:
    """The objective of a batch before and after some steps on it, and whether all that is kept is finite."""
    trainer = made(config)
    batch = next(batches(trainer))
    stream = itertools.repeat(batch)
    with mock.patch.object(Trainer, "peak_rate", 0.01 * trainer.peak_rate):
        for step in range(FILLED):
            trainer.step(step, stream)
    before = judged(trainer, batch)
    for step in range(FILLED, FILLED + STEPS):
        trainer.step(step, stream)
    finite = all(torch.isfinite(t).all() for part in state(trainer).values() for t in part.values())
    return before, judged(trainer, batch), finite and not trainer.gate.check(before=FILLED + STEPS)


def require_trains(images: Path, workers, named: str, target: str, stage: int) -> None:
    config = config_of(str(images), named, target, engine__zero_stage=stage)
    for before, after, is_good in workers(2).run(trained, config):
        assert is_good and after < before


@pytest.mark.parametrize(("named", "target", "stage"), COVERING)
def test_every_method_lowers_its_objective(images, workers, named, target, stage):
    require_trains(images, workers, named, target, stage)


@pytest.mark.slow
@pytest.mark.parametrize(("named", "target", "stage"), [each for each in MATRIX if each not in COVERING])
def test_every_method_lowers_its_objective_with_every_branch_at_every_stage(images, workers, named, target, stage):
    require_trains(images, workers, named, target, stage)


def alone(configs: list[Config]) -> list[bool]:
    """Whether each takes two steps; in the first of all MoCo has no samples, and no gradient."""
    found, two = [], None
    for config in configs:
        trainer = made(config)
        two = two or list(itertools.islice(batches(trainer), 2))
        before, stream = state(trainer), iter(two)
        for step in range(2):
            trainer.step(step, stream)
        found.append("parameters" in changed(before, state(trainer)) and not trainer.gate.check(before=2))
    return found


@pytest.mark.parametrize("target", ["momentum", "stop_gradient", "weight_sharing"])
def test_every_method_takes_steps_on_one_rank(images, workers, target):
    """There batch norm is torch's own."""
    some = [named for named in METHOD if target in targets(named)[:2]]
    assert all(workers(1).run(alone, [config_of(str(images), named, target) for named in some])[0])


MULTICROP = {
    **{"data__recipe": "multicrop", "data__image_size": 32, "data__local_crops": 2, "data__local_views": {"size": 16}},
    "engine__accumulation_steps": 2,
}


def losses(configs: list[Config]) -> list[list[float]]:
    """Of two steps of each run, after a warm-up that leaves no trace; of two micro-batches each."""
    found, four = [], {}
    for config in configs:
        trainer = made(config)
        trainer.warm_up()
        if config.data not in four:
            four[config.data] = list(itertools.islice(batches(trainer), 4))
        stream = iter(four[config.data])
        for step in range(2):
            trainer.step(step, stream)
        found.append([metrics["loss"] for _, metrics in trainer.metrics(before=2)])
    return found


def require_ranks_agree(images: Path, workers, forms: list[str]) -> None:
    configs = [config_of(str(images), named, **MULTICROP) for named in forms]
    for named in forms:
        if not FORMS[named].mixes_samples:
            source = (
                {"objective__correlation_source": "target"} if "correlation_source" in FORMS[named].model_fields else {}
            )
            mixed = {**MULTICROP, **source, "data__cutmix": {"probability": 1.0, "group": 4}}
            configs += [config_of(str(images), named, target, **mixed) for target in targets(named)[:2]]
    for one, two in zip(workers(1).run(losses, configs)[0], workers(2).run(losses, configs)[0], strict=True):
        assert two == pytest.approx(one, rel=1e-4, abs=1e-4)


def test_multicrop_cutmix_and_accumulation_are_the_same_on_two_ranks(images, workers):
    require_ranks_agree(images, workers, ["moco", "original byol", "original barlow_twins"])


@pytest.mark.slow
def test_every_method_with_multicrop_and_cutmix_is_the_same_on_two_ranks(images, workers):
    require_ranks_agree(images, workers, list(METHOD))


def passes(config: Config) -> tuple[list[bool], int]:
    """Of each pass of an encoder in a step whether it had a gradient, and the parameters of the target's copy."""
    trainer, found, forward = made(config), [], Encoder.forward

    def noting(encoder: Encoder, views: list[Tensor]) -> list[Tensor]:
        found.append(torch.is_grad_enabled())
        return forward(encoder, views)

    with mock.patch.object(Encoder, "forward", noting):
        trainer.step(0, batches(trainer))
    return found, len(list(trainer.target.parameters()))


@pytest.mark.parametrize("named", ["unigrad", "original simclr"])
def test_without_a_momentum_target_there_is_no_copy_and_no_pass_but_one_under_cutmix(images, workers, named):
    source = {"objective__correlation_source": "target"} if named == "unigrad" else {}
    with_momentum, copied = workers(1).run(passes, config_of(str(images), named, **source))[0]
    assert with_momentum == [False, True] and copied
    for target in ("stop_gradient", "weight_sharing"):
        config = config_of(str(images), named, target, **source)
        assert workers(1).run(passes, config)[0] == ([True], 0)
        mixed = config_of(str(images), named, target, **source, **CUTMIX)
        assert workers(1).run(passes, mixed)[0] == ([False, True], 0)


def rates(config: Config) -> list[tuple[bool, list[float]]]:
    trainer = made(config)
    stream, found = batches(trainer), []
    for step in range(3):
        trainer.step(step, stream)
        found.append([group["lr"] / trainer.peak_rate for group in trainer.optimizer.param_groups])
    return found


@pytest.mark.parametrize("stage", [0, 2])
def test_the_rate_of_simsiams_predictor_is_constant_and_of_the_rest_as_scheduled(images, workers, stage):
    for first, second, third in workers(2).run(
        rates, config_of(str(images), "original simsiam", engine__zero_stage=stage)
    ):
        assert first == pytest.approx([0.001, 1]) and third[0] > second[0] > 0.1 and second[1] == third[1] == 1
    ((first, *_), _) = workers(2).run(rates, config_of(str(images), "original byol", engine__zero_stage=stage))
    assert first == pytest.approx([0.001])


def goes_on(config: Config, output: Path) -> dict[str, list[str]]:
    """What differs between a third step and the same by another trainer from a checkpoint."""
    config = config.model_copy(update={"output": output})
    trainer, other = made(config), made(config)
    stream = batches(trainer)
    for step in range(2):
        trainer.step(step, stream)
    checkpoint.restore(other, Reader(checkpoint.save(trainer, {})))
    trainer.step(2, stream)
    other.step(2, batches(other, 2))
    return changed(state(trainer), state(other))


def as_restored(config: Config, folder: Path) -> dict[str, Tensor]:
    """All that is kept of the objective, and its heads' weights, from a checkpoint."""
    trainer = made(config)
    checkpoint.restore(trainer, Reader(folder))
    return {f.name: f.tensor.clone() for f in checkpoint.state(trainer) if f.name.startswith("objective.")} | {
        name: p.detach().clone() for name, p in trainer.online.module.named_parameters() if name.startswith(HEADS)
    }


HEADS = ("predictor.", "head.")
KEPT = {
    "moco": ["bank.keys", "bank.taken", "bank.updates"],
    "original moco": ["bank.keys", "bank.taken", "bank.updates"],
    "byol_directpred": ["average.correlation", "average.updates", "direct.largest", "direct.matrix"],
    "original byol_directpred": ["average.correlation", "average.updates", "direct.largest", "direct.matrix"],
    "original byol": ["predictor.norm.running_mean", "predictor.norm.running_var"],
    "original simsiam": ["predictor.norm.running_mean", "predictor.norm.running_var"],
    "original dino": ["centre.mean", "target_head.weight"],
    "original twist": [],
    "original swav": ["queue.keys", "queue.taken", "queue.updates"],
}


@pytest.mark.parametrize(
    ("named", "stage"), [*((named, 2) for named in KEPT), ("original dino", 0), ("original swav", 0)]
)
def test_what_a_method_keeps_goes_on_bit_for_bit_and_to_other_ranks_and_stages(images, workers, tmp_path, named, stage):
    config = config_of(str(images), named, engine__zero_stage=stage)
    for differing in workers(2).run(goes_on, config, tmp_path):
        assert differing == {}
    (folder,) = (tmp_path / "checkpoints").glob("step-*")
    there = workers(2).run(as_restored, config, folder)[0]
    assert sorted(name.removeprefix("objective.") for name in there if name.startswith("objective.")) == KEPT[named]
    has_head = any(key in FORMS[named].model_fields for key in ("predictor_hidden", "prototypes"))
    assert any(name.startswith(HEADS) for name in there) == has_head
    alone = workers(1).run(as_restored, config_of(str(images), named), folder)[0]
    assert there.keys() == alone.keys() and all(torch.equal(there[name], alone[name]) for name in there)


def dropped(config: Config) -> dict[str, list[str]]:
    """What a step that meets a NaN on one rank changes."""
    trainer = made(config)
    stream = batches(trainer)
    trainer.step(0, stream)
    before = state(trainer)
    batch = next(stream)
    if dist.get_rank() == 1:
        batch.views[0] = batch.views[0].clone()
        batch.views[0][0, 1, 5, 5] = torch.nan
    trainer.step(1, iter([batch]))
    return changed(before, state(trainer))


@pytest.mark.parametrize(
    ("named", "target"),
    [
        ("original byol", "stop_gradient"),
        ("moco", "momentum"),
        ("byol_directpred", "momentum"),
        ("original dino", "momentum"),
        ("original swav", "stop_gradient"),
    ],
)
def test_a_step_with_a_nan_leaves_no_trace_in_what_a_method_keeps(images, workers, named, target):
    for differing in workers(2).run(dropped, config_of(str(images), named, target)):
        assert differing == {}


def prototypes(config: Config) -> list[tuple[Tensor, Tensor, bool, float]]:
    """After each of four steps, in epochs of three: the head, the teacher's, whether optimizer and network hold the
    same weights, and the epoch that the objective was told.
    """
    trainer = made(config)
    stream, found = batches(trainer), []
    for step in range(4):
        trainer.step(step, stream)
        objective, weight = trainer.objective, trainer.objective.head.weight.detach()
        moved = [f for f in trainer.fragments.parameters() if f.name == "head.weight"]
        parts = [weight.reshape(-1)[f.start : f.start + f.tensor.numel()] for f in moved]
        is_same = all(torch.equal(f.tensor.reshape(-1), part) for f, part in zip(moved, parts, strict=True))
        teacher = getattr(objective, "target_head", objective.head).weight.detach()
        found.append((weight.clone(), teacher.clone(), is_same, float(objective.epoch)))
    return found


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("named", ["original dino", "original swav"])
def test_prototypes_are_frozen_in_the_first_epoch_and_then_move_and_those_of_swav_keep_the_length_one(
    images, workers, named, stage
):
    config = config_of(str(images), named, engine__zero_stage=stage, objective__freeze_epochs=1.0)
    for found in workers(2).run(prototypes, config):
        assert [epoch for *_, epoch in found] == [0, 1 / 3, 2 / 3, 1] and all(is_same for _, _, is_same, _ in found)
        unit = [torch.nn.functional.normalize(weight, dim=1) for weight, *_ in found]
        for later in unit[1:3]:  # weight decay changes lengths alone, and these by some roundings
            torch.testing.assert_close(later, unit[0], rtol=0, atol=1e-6)
        assert (unit[3] - unit[2]).norm() > 1e-4
        if named == "original swav":
            torch.testing.assert_close(found[3][0], unit[3], rtol=0, atol=1e-6)


def test_the_teachers_head_follows_with_the_momentum_of_the_target(images, workers):
    found = workers(2).run(prototypes, config_of(str(images), "original dino", target__momentum=0.9))[0]
    for (_, before, *_), (weight, after, *_) in itertools.pairwise(found):
        share = (after - before).norm() / (weight - before).norm()
        assert 0 < share < 0.1001  # 1 − momentum, which rises from 0.9
        torch.testing.assert_close(after, before + share * (weight - before), rtol=0, atol=1e-6)
