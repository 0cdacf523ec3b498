"""A new method is a declaration and a loss: configuration, help, tables, `build` and the trainer follow from those."""

from __future__ import annotations

import copy
import itertools
import pickle
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from trainer_state import batches, changed, make_trainer, small_config, state

from unigrad_fast.cli import main
from unigrad_fast.config import Config, resolve, to_yaml
from unigrad_fast.objectives import build
from unigrad_fast.objectives.catalogue import FORMS, Positive, Settings, declare
from unigrad_fast.objectives.originals import ORIGINALS
from unigrad_fast.objectives.originals.original import OriginalLoss, Views, mean
from unigrad_fast.recipes import recipe_names
from unigrad_fast.runtime.errors import UserError
from unigrad_fast.runtime.validation import keys
from unigrad_fast.training import checkpoint
from unigrad_fast.training.trainer import Trainer


class MadeUpSettings(Settings):
    sharpness: Positive
    """Power of the cosine (made-up paper)."""


def declare_made_up() -> None:
    declare("made_up", "original", settings=MadeUpSettings, sharpness=3.0)

    class MadeUp(OriginalLoss, method="made_up"):
        """L = mean of −cos(u, m⁺)·s."""

        sharpness: float

        def loss_of(self, views: Views) -> Tensor:
            return -self.sharpness * mean(views.cosine)


@pytest.fixture
def made_up():
    declare_made_up()
    yield
    del FORMS["original made_up"], ORIGINALS["made_up"]


def test_the_configuration_takes_it_with_its_settings_and_no_others(made_up, tmp_path):
    config = resolve(overrides=["--objective.method", "made_up", "--objective.sharpness", "2"])
    assert dict(config.objective) == {
        **{"method": "made_up", "form": "original", "row": None, "target": "momentum", "sharpness": 2.0}
    }
    (tmp_path / "printed.yaml").write_text(to_yaml(config))
    assert resolve(tmp_path / "printed.yaml") == config == Config(**config.model_dump())
    assert pickle.loads(pickle.dumps(config)) == config
    assert "cifar_subset_made_up" in recipe_names()
    others = {form.names["method"]: None for form in FORMS.values() if "temperature" in form.model_fields}
    for arguments, message in (
        (
            "--objective.method made_up --objective.temperature 0.1",
            "objective.temperature = 0.1: does not apply to the original of made_up; leave it out (it takes sharpness; "
            f"temperature belongs to {', '.join(others)})",
        ),
        (
            "--objective.sharpness 2",
            "objective.sharpness = 2: does not apply to unigrad; leave it out (it takes balance, correlation_source, "
            "decay, negative_target, placement; sharpness belongs to made_up)",
        ),
        (
            "--objective.method made_up --objective.sharpness 0",
            "objective.sharpness = 0: must be a number above 0",
        ),
        (
            "--objective.method made_up --objective.sharpnes 1",
            "objective.sharpnes = 1: unknown key; did you mean objective.sharpness?",
        ),
    ):
        with pytest.raises(UserError) as caught:
            resolve(overrides=arguments.split())
        assert str(caught.value) == message


def test_help_and_the_table_of_keys_have_it(made_up, capsys):
    with pytest.raises(SystemExit):
        main(["pretrain", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "--objective.sharpness FLOAT Power of the cosine (made-up paper). 3 for original made_up. (default: 3)" in said
    )
    assert "objective.sharpness" in keys(Config)


def test_build_makes_it(made_up):
    assert build("made_up", width=8, sharpness=2.0).sharpness == 2.0
    with pytest.raises(TypeError, match="decay does not apply to the original of made_up; it takes sharpness, target"):
        build("made_up", width=8, decay=0.9)


def takes_steps(images: str) -> bool:
    declare_made_up()
    trainer = make_trainer(
        small_config(images, objective__method="made_up", objective__correlation_source=None), blocks=0
    )
    before, stream = state(trainer), itertools.repeat(next(batches(trainer)))
    for step in range(2):
        trainer.step(step, stream)
    return trainer.objective.sharpness == 3.0 and "parameters" in changed(before, state(trainer))


def test_it_trains(images: Path, workers):
    assert workers(1).run(takes_steps, str(images)) == [True]


def made_with(images: str, name: str, weights: nn.Module | nn.Parameter) -> Trainer:
    """A trainer of a loss with weights of its own, which it pulls to 0."""
    declare_made_up()
    kind = ORIGINALS["made_up"]
    plain, loss_of = kind.__init__, kind.loss_of

    def with_weights(self: nn.Module, width: int, **settings: object) -> None:
        plain(self, width, **settings)
        setattr(self, name, copy.deepcopy(weights))

    def pulled(self: nn.Module, views: Views) -> Tensor:
        return loss_of(self, views) + sum(weight.square().sum() for weight in self.parameters())

    config = small_config(images, objective__method="made_up", objective__correlation_source=None)
    kind.loss_of = pulled
    with mock.patch.object(kind, "__init__", with_weights):
        return make_trainer(config, blocks=0)


def trained_part(images: str) -> list[str]:
    """What steps change of the weights of a part of a loss, and what a checkpoint has of them."""
    trainer = made_with(images, "classes", nn.Linear(32, 4))
    before, stream = state(trainer), batches(trainer)
    for step in range(2):
        trainer.step(step, stream)
    moved = changed(before, state(trainer))["parameters"]
    saved = [fragment.name for fragment in checkpoint.state(trainer)]
    return [name for name in moved + saved if "classes" in name]


def test_weights_in_a_part_of_a_loss_are_trained_and_saved(images: Path, workers):
    names = ["classes.weight", "classes.bias"]
    kept = [f"{kind}.{name}" for kind in ("online", "momentum") for name in names]
    assert workers(1).run(trained_part, str(images)) == [[*names, *kept]]


def untrained_weights(images: str) -> str:
    """How a loss with weights outside of its parts is refused."""
    with pytest.raises(TypeError) as caught:
        made_with(images, "scale", nn.Parameter(torch.ones(4)))
    return str(caught.value)


def test_weights_of_a_loss_that_nothing_would_train_are_refused(images: Path, workers):
    (said,) = workers(1).run(untrained_weights, str(images))
    assert said.startswith("MadeUp has parameters that no optimizer trains")
