"""The methods as settings: they are what `build` takes, recipes exist for each, and what does not fit is refused."""

from __future__ import annotations

import inspect

import pytest

from unigrad_fast.config import Config, resolve
from unigrad_fast.objectives import GradientForm, UniGrad, build
from unigrad_fast.objectives.methods import METHOD_OF, METHODS, ORIGINALS
from unigrad_fast.recipes import methods, recipe_names
from unigrad_fast.runtime.errors import UserError

OF_A_RUN = {"width", "target", "process_group", "most_images", "compute_dtype", "placement"}
ORIGINAL = "original "


def which(named: str) -> dict[str, str]:
    """What `build` and the configuration name a form by."""
    if len(named) == 1:
        return {"row": named}
    return {"method": named.removeprefix(ORIGINAL), "form": "original" if ORIGINAL in named else "gradient"}


def objective_of(named: str, **settings) -> Config:
    return resolve(overrides={"objective": {**which(named), **settings}})


def refusal(arguments: str) -> str:
    with pytest.raises(UserError) as caught:
        resolve(overrides=arguments.split())
    (line,) = str(caught.value).splitlines()
    return line


def test_methods_and_rows_are_those_of_the_objectives():
    assert methods.METHODS == METHODS and methods.METHOD_OF == METHOD_OF
    forms = {named.removeprefix(ORIGINAL) for named in methods.SETTINGS if ORIGINAL in named}
    assert forms == ORIGINALS.keys() and set("abdefghij") <= methods.SETTINGS.keys()


@pytest.mark.parametrize("named", methods.SETTINGS)
def test_a_form_is_built_with_its_settings_and_they_are_its_defaults(named):
    arguments = methods.build_arguments(dict(objective_of(named).objective))
    built, plain = build(width=16, **arguments), build(width=16, **which(named))
    assert type(built) is type(plain)
    if isinstance(plain, GradientForm):
        assert built.row == plain.row and built.target == plain.target
        assert plain.row.options == arguments.keys() - {"method", "form", "row", "target"}
        return
    taken = set(inspect.signature(type(plain)).parameters) - OF_A_RUN - {"predictor"}
    given = arguments.keys() - {"method", "form", "row", "target"}
    assert given | ({"hidden"} if "hidden" in taken else set()) == taken
    if named == "original moco":
        assert built.bank.keys.shape == plain.bank.keys.shape == (arguments["bank_size"], 16)
    for name in taken - {"hidden", "bank_size"}:
        assert getattr(built, name) == getattr(plain, name) == arguments[name]
    assert isinstance(plain, UniGrad) or built.target == plain.target


@pytest.mark.parametrize("named", methods.SETTINGS)
def test_every_setting_of_a_form_can_be_given(named):
    """By a value of its own, which reaches what is built."""
    for key, default in methods.SETTINGS[named].items():
        if not isinstance(default, float):
            continue
        value = default / 2
        arguments = methods.build_arguments(dict(objective_of(named, **{key: value}).objective))
        built = build(width=16, **arguments)
        name = methods.BUILT_AS.get(key, key)
        assert getattr(built.row if isinstance(built, GradientForm) else built, name) == value


def test_each_method_has_a_recipe_at_the_papers_setting_and_one_for_the_subset():
    for base in ("imagenet_100ep", "cifar_subset"):
        plain = resolve(base)
        for method in METHODS[1:]:
            config = resolve(f"{base}_{method}")
            assert f"{base}_{method}" in recipe_names() and config.objective.method == method
            assert config.model_copy(update={"recipe": base, "objective": plain.objective}) == plain


def test_the_papers_setting_has_each_methods_own_numbers():
    found = {method: resolve(f"imagenet_100ep_{method}").objective for method in METHODS[1:]}
    assert [found[method].balance for method in ("barlow_twins", "vicreg")] == [50, 25]
    assert found["moco"].temperature == found["simclr"].temperature == 0.2 and found["moco"].bank_size == 65536
    assert {found[method].target for method in METHODS[1:] if method != "simsiam"} == {"momentum"}
    assert (found["simsiam"].target, found["simsiam"].predictor_rate) == ("stop_gradient", "constant")
    assert found["byol"].form == found["simsiam"].form == "original"


@pytest.mark.parametrize("base", ["imagenet_100ep", "cifar_subset"])
def test_another_method_on_the_command_line_is_its_recipe(base, tmp_path):
    for method in METHODS[1:]:
        there = resolve(base, ["--objective.method", method])
        assert there.objective == resolve(f"{base}_{method}").objective
        file = tmp_path / "mine.yaml"
        file.write_text(f"recipe: {base}\nobjective: {{method: {method}}}\n")
        assert resolve(file).objective == there.objective
    assert resolve(base, ["--objective.method", "unigrad"]) == resolve(base)
    assert resolve(f"{base}_moco", ["--objective.method", "unigrad"]).objective.method == "unigrad"


def test_a_methods_own_settings_stay_where_only_one_of_them_is_changed():
    config = resolve("cifar_subset_moco", ["--objective.temperature", "0.1"]).objective
    assert (config.method, config.temperature, config.bank_size) == ("moco", 0.1, 1024)
    config = resolve("cifar_subset_moco", ["--objective.form", "original"]).objective
    assert (config.method, config.form, config.bank_size) == ("moco", "original", 1024)
    config = resolve("cifar_subset", ["--objective.row", "d"]).objective
    assert (config.method, config.decay, config.balance, config.epsilon) == ("byol_directpred", 0.8, "dynamic", 0.3)


def test_the_negative_branch_decides_where_the_correlation_comes_from():
    given = {"negative_target": "stop_gradient"}
    assert objective_of("unigrad").objective.correlation_source == "target"
    assert objective_of("unigrad", **given).objective.correlation_source == "online"
    assert objective_of("e").objective.correlation_source == "online"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--objective.method mocco", "objective.method = mocco: must be one of unigrad, moco"),
        (
            "--objective.method simclr --objective.epsilon 0",
            "objective.epsilon = 0: does not apply to simclr; leave it",
        ),
        (
            "--objective.method simclr --objective.both_terms true --objective.target weight_sharing",
            "objective.both_terms = true: does not apply to simclr; leave it out (it takes balance, negative_target, "
            "positive_factor, temperature; objective.row b has it)",
        ),
        (
            "--objective.method vicreg --objective.invariance 3",
            "objective.invariance = 3: does not apply to vicreg; leave it out (it takes balance, positive_factor; "
            "objective.form original has it)",
        ),
        (
            "--objective.row i --objective.balance 0",
            "objective.balance = 0: row i divides by it; give a number above 0",
        ),
        (
            "--objective.method byol_directpred --objective.form original --objective.eigen_predictor full",
            "objective.eigen_predictor = full: the original of byol_directpred has authors and paper; use one of them",
        ),
        (
            "--objective.row c --objective.form gradient",
            "objective.form = gradient: row c is the other form; leave objective.form or objective.row out",
        ),
        ("--objective.temperature 0.1", "objective.temperature = 0.1: does not apply to unigrad; leave it out (it tak"),
        (
            "--objective.form original",
            "objective.form = original: unigrad is a gradient and has no original form; leave",
        ),
        (
            "--objective.method byol --objective.form gradient",
            "objective.form = gradient: byol has no gradient form; leave objective.form out",
        ),
        (
            "--objective.row d --objective.method simclr",
            "objective.row = d: is of method byol_directpred, not of simclr; leave one of the two out",
        ),
        (
            "--objective.row d --objective.form original",
            "objective.form = original: row d is the other form; leave objective.form or objective.row out",
        ),
        (
            "--objective.balance dynamic",
            "objective.balance = dynamic: is a ratio with byol_directpred's W_h; give a num",
        ),
        ("--objective.row b --objective.both_terms true", "objective.both_terms = true: is the gradient of shared wei"),
        (
            "--objective.row b --objective.both_terms true --objective.target weight_sharing --data.local_crops 2",
            "objective.both_terms = true: is of two global views as they are; leave local crops and CutMix out",
        ),
        (
            "--objective.negative_target stop_gradient --objective.correlation_source target",
            "objective.correlation_source = target: objective.negative_target stop_gradient takes the correlation from",
        ),
        (
            "--objective.method moco --objective.placement sharded",
            "objective.placement = sharded: only unigrad's correlation matrix lies in shards; use auto",
        ),
        (
            "--objective.target stop_gradient --engine.target_stream true",
            "engine.target_stream = true: with objective.target stop_gradient there is no branch that could pass",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused_with_the_remedy(arguments, message):
    assert refusal(arguments).startswith(message)


@pytest.mark.parametrize("method", ["byol", "simsiam", "byol_directpred"])
def test_shared_weights_are_refused_where_they_collapse(method):
    line = refusal(f"--objective.method {method} --objective.target weight_sharing")
    assert "all embeddings become one; use momentum or stop_gradient" in line


@pytest.mark.parametrize("named", methods.SETTINGS)
def test_cutmix_is_refused_where_samples_would_be_of_mixed_images(named):
    mixing = {"data": {"cutmix": {"probability": 1.0}}}
    source = {"correlation_source": "target"} if "correlation_source" in methods.SETTINGS[named] else {}
    tree = {**mixing, "objective": {**which(named), **source}}
    if named.removeprefix(ORIGINAL) in ("barlow_twins", "vicreg", *"fghij"):
        with pytest.raises(UserError, match=r"CutMix is refused .* leave CutMix out"):
            resolve(overrides=tree)
        return
    resolve(overrides=tree)
    if "negative_target" in methods.SETTINGS[named]:
        tree["objective"] = {**which(named), "negative_target": "stop_gradient"}
        with pytest.raises(UserError, match=r"objective\.negative_target = stop_gradient: with CutMix .* leave it out"):
            resolve(overrides=tree)
    if source:
        tree["objective"] = {**which(named), "correlation_source": "online"}
        with pytest.raises(UserError, match=r"with CutMix set objective\.correlation_source to target"):
            resolve(overrides=tree)


def test_a_configuration_from_before_there_were_methods_is_the_same_run():
    """As a checkpoint of UniGrad holds it."""
    saved = {"method": "unigrad", "balance": 10.0, "decay": 0.8, "correlation_source": "online", "placement": "auto"}
    assert Config(objective=saved).objective == resolve("cifar_subset").objective
