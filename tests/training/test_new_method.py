"""A new method is a declaration and a loss: configuration, help, tables, `build` and the trainer follow from those."""

from __future__ import annotations

import itertools
import pickle
from pathlib import Path
from unittest import mock

import pytest
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


def untrained_weights(images: str) -> str:
    """How a loss with weights of its own is refused."""
    declare_made_up()
    plain = ORIGINALS["made_up"].__init__

    def with_weights(self: nn.Module, width: int, **settings: object) -> None:
        plain(self, width, **settings)
        self.prototypes = nn.Linear(width, 4)

    config = small_config(images, objective__method="made_up", objective__correlation_source=None)
    with mock.patch.object(ORIGINALS["made_up"], "__init__", with_weights), pytest.raises(TypeError) as caught:
        make_trainer(config, blocks=0)
    return str(caught.value)


def test_weights_of_a_loss_that_nothing_would_train_are_refused(images: Path, workers):
    (said,) = workers(1).run(untrained_weights, str(images))
    assert said.startswith("MadeUp has parameters that no optimizer trains")
