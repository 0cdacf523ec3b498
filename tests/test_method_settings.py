"""The methods as settings: they are what `build` takes, recipes exist for each, and what does not fit is refused."""

from __future__ import annotations

import pytest
import yaml

from unigrad_fast.config import Config, resolve, to_yaml
from unigrad_fast.objectives import GradientForm, UniGrad, build
from unigrad_fast.objectives.catalogue import FORMS, Settings, methods
from unigrad_fast.objectives.forms import GRADIENTS
from unigrad_fast.objectives.originals import ORIGINALS
from unigrad_fast.recipes import recipe_names
from unigrad_fast.runtime.errors import UserError
from unigrad_fast.runtime.validation import validate
from unigrad_fast.training.same_run import contradictions

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


def test_every_declared_form_is_computed_by_a_row_or_a_loss():
    assert {named for named, form in FORMS.items() if form.names["form"] == "gradient"} == GRADIENTS.keys()
    assert {form.names["method"] for form in FORMS.values() if form.names["form"] == "original"} == ORIGINALS.keys()


@pytest.mark.parametrize("named", FORMS)
def test_a_form_is_built_with_its_settings_and_they_are_its_defaults(named):
    arguments = objective_of(named).objective.arguments()
    built, plain = build(width=16, **arguments), build(width=16, **which(named))
    assert type(built) is type(plain)
    if isinstance(plain, GradientForm):
        assert built.row == plain.row and built.target == plain.target
        assert arguments.keys() == {"method", "form", "row", "target", *FORMS[named].built()}
        return
    given = FORMS[named].built().keys() - {"negative_target", "hidden"}
    for name in given:
        assert getattr(built, name) == getattr(plain, name) == arguments[name]
    if named == "original moco":
        assert built.bank.keys.shape == plain.bank.keys.shape == (arguments["bank_size"], 16)
    assert isinstance(plain, UniGrad) or built.target == plain.target


@pytest.mark.parametrize("named", FORMS)
def test_every_setting_of_a_form_can_be_given(named):
    """By a value of its own, which reaches what is built."""
    for key, default in objective_of(named).objective:
        if not isinstance(default, float):
            continue
        value = default / 2
        built = build(width=16, **objective_of(named, **{key: value}).objective.arguments())
        name = FORMS[named].built_as.get(key, key)
        assert getattr(built.row if isinstance(built, GradientForm) else built, name) == value


def test_each_method_has_a_recipe_at_the_papers_setting_and_one_for_the_subset():
    for base in ("imagenet_100ep", "cifar_subset"):
        plain = resolve(base)
        for method in methods()[1:]:
            config = resolve(f"{base}_{method}")
            assert f"{base}_{method}" in recipe_names() and config.objective.method == method
            assert config.model_copy(update={"recipe": base, "objective": plain.objective}) == plain


def test_the_papers_setting_has_each_methods_own_numbers():
    found = {method: resolve(f"imagenet_100ep_{method}").objective for method in methods()[1:]}
    assert [found[method].balance for method in ("barlow_twins", "vicreg")] == [50, 25]
    assert found["moco"].temperature == found["simclr"].temperature == 0.2 and found["moco"].bank_size == 65536
    others = {"simsiam": "stop_gradient", "swav": "stop_gradient", "twist": "weight_sharing"}
    assert {method: found[method].target for method in found} == {m: others.get(m, "momentum") for m in found}
    assert [found[method].prototypes for method in ("dino", "twist", "swav")] == [65536, 4096, 3000]
    assert (found["simsiam"].target, found["simsiam"].predictor_rate) == ("stop_gradient", "constant")
    assert found["byol"].form == found["simsiam"].form == "original"


@pytest.mark.parametrize("base", ["imagenet_100ep", "cifar_subset"])
def test_another_method_on_the_command_line_is_its_recipe(base, tmp_path):
    for method in methods()[1:]:
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
            "objective.eigen_predictor = full: the original of byol_directpred supports only authors and paper; use o",
        ),
        (
            "--objective.row c --objective.form gradient",
            "objective.form = gradient: row c exists only in the form original; leave form out",
        ),
        ("--objective.temperature 0.1", "objective.temperature = 0.1: does not apply to unigrad; leave it out (it tak"),
        (
            "--objective.form original",
            "objective.form = original: unigrad is defined by its gradient and has no original form; leave",
        ),
        *(
            (
                f"--objective.method {method} --objective.form gradient",
                f"objective.form = gradient: {method} has no gradient form; leave it out",
            )
            for method in ("dino", "twist", "swav")
        ),
        (
            "--objective.method dino --objective.target stop_gradient",
            "objective.target = stop_gradient: refused for dino: a teacher that copies its student at every step "
            "collapses (DINO paper); use momentum",
        ),
        (
            "--objective.method twist --objective.target momentum",
            "objective.target = momentum: refused for twist: both views have a gradient and there is no target branch; "
            "use weight_sharing",
        ),
        (
            "--objective.method swav --objective.target weight_sharing",
            "objective.target = weight_sharing: refused for swav: no gradient flows into codes, so this is "
            "stop_gradient; use momentum or stop_gradient",
        ),
        (
            "--objective.method twist --data.cutmix.probability 0.5",
            "data.cutmix.probability = 0.5: CutMix is refused with the original of twist: ",
        ),
        (
            "--objective.method byol --objective.form gradient",
            "objective.form = gradient: byol has no gradient form; leave it out",
        ),
        (
            "--objective.row d --objective.method simclr",
            "objective.row = d: belongs to method byol_directpred, not simclr; leave one of the two out",
        ),
        (
            "--objective.row d --objective.form original",
            "objective.form = original: row d exists only in the form gradient; leave form out",
        ),
        (
            "--objective.balance dynamic",
            "objective.balance = dynamic: needs the predictor of byol_directpred; give a num",
        ),
        ("--objective.row b --objective.both_terms true", "objective.both_terms = true: needs shared weights; use obj"),
        (
            "--objective.row b --objective.both_terms true --objective.target weight_sharing --data.local_crops 2",
            "objective.both_terms = true: needs two global views, unmixed; leave local crops and CutMix out",
        ),
        (
            "--objective.negative_target stop_gradient --objective.correlation_source target",
            "objective.correlation_source = target: with objective.negative_target stop_gradient the correlation must",
        ),
        (
            "--objective.method moco --objective.placement sharded",
            "objective.placement = sharded: does not apply to moco; leave it out (it takes balance, bank_size, "
            "negative_target, positive_factor, temperature; placement belongs to unigrad)",
        ),
        (
            "--objective.target stop_gradient --engine.target_stream true",
            "engine.target_stream = true: with objective.target stop_gradient there is no target branch to overlap",
        ),
        (
            "--recipe cifar_subset_simclr --objective.row j",
            "objective.row = j: belongs to method vicreg, but the recipe trains simclr; add objective.method vicreg, "
            "or use one of imagenet_100ep_vicreg, cifar_subset_vicreg",
        ),
        (
            "--recipe cifar_subset_simsiam --target.momentum 0.9",
            "target.momentum = 0.9: has no effect, because with objective.target stop_gradient no branch has momentum",
        ),
        (
            "--data.cutmix.alpha 2",
            "data.cutmix.alpha = 2: has no effect, because data.cutmix.probability is 0; leave it out",
        ),
        (
            "--data.progressive.epochs 3",
            "data.progressive.epochs = 3: has no effect, because data.progressive.start_size is null; leave it out",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused_with_the_remedy(arguments, message):
    assert refusal(arguments).startswith(message)


def test_a_recipe_may_keep_values_that_its_method_does_not_use_and_a_named_method_may_replace_it(tmp_path):
    assert resolve("cifar_subset", ["--objective.method", "simsiam"]).target.momentum == 0.8
    assert resolve("cifar_subset_simclr", ["--objective.method", "vicreg", "--objective.row", "j"]).objective.row == "j"
    file = tmp_path / "printed.yaml"
    for config in (resolve("cifar_subset_simsiam"), resolve("cifar_subset", ["--objective.row", "j"])):
        file.write_text(to_yaml(config))
        assert resolve(file) == config


@pytest.mark.parametrize("method", ["byol", "simsiam", "byol_directpred"])
def test_shared_weights_are_refused_where_they_collapse(method):
    line = refusal(f"--objective.method {method} --objective.target weight_sharing")
    assert "all embeddings become one; use momentum or stop_gradient" in line


def test_these_forms_take_samples_from_the_batch_itself():
    names = {"barlow_twins", "vicreg", "original barlow_twins", "original vicreg", *"fghij"}
    assert names <= {named for named, form in FORMS.items() if form.mixes_samples}


@pytest.mark.parametrize("named", FORMS)
def test_cutmix_is_refused_where_samples_would_be_of_mixed_images(named):
    mixing = {"data": {"cutmix": {"probability": 1.0}}}
    source = {"correlation_source": "target"} if "correlation_source" in FORMS[named].model_fields else {}
    tree = {**mixing, "objective": {**which(named), **source}}
    if FORMS[named].mixes_samples:
        with pytest.raises(UserError, match=r"CutMix is refused .* leave CutMix out"):
            resolve(overrides=tree)
        return
    resolve(overrides=tree)
    if "negative_target" in FORMS[named].model_fields:
        tree["objective"] = {**which(named), "negative_target": "stop_gradient"}
        with pytest.raises(UserError, match=r"objective\.negative_target = stop_gradient: with CutMix .* leave it out"):
            resolve(overrides=tree)
    if source:
        tree["objective"] = {**which(named), "correlation_source": "online"}
        with pytest.raises(UserError, match=r"with CutMix set objective\.correlation_source to target"):
            resolve(overrides=tree)


@pytest.mark.parametrize("named", FORMS)
def test_a_configuration_that_held_the_keys_of_all_methods_is_the_same_run(named):
    """As checkpoints and run folders hold it: null for other methods' keys, but for two."""
    now = objective_of(named)
    others = {"placement": "auto", "both_terms": False} | dict.fromkeys(
        Settings.model_fields.keys() - {"placement", "both_terms"}
    )
    before = now.model_dump(mode="json")
    before["objective"] = {**others, **before["objective"]}
    assert validate(Config, before) == now and resolve(overrides=before) == now
    assert contradictions(now, before, "the run") == []


def test_the_keys_that_are_printed_are_those_of_the_method():
    printed = yaml.safe_load(to_yaml(resolve("imagenet_100ep_simclr", ["--objective.form", "original"])))["objective"]
    assert printed == {
        **{"method": "simclr", "form": "original", "row": None, "target": "momentum", "temperature": 0.2},
    }


def test_another_method_contradicts_a_run_by_its_name():
    told = contradictions(objective_of("moco"), objective_of("unigrad").model_dump(mode="json"), "the run")
    assert "objective.method = moco: the run has unigrad" in told


def test_a_configuration_from_before_there_were_methods_is_the_same_run():
    """As a checkpoint of UniGrad holds it."""
    saved = {"method": "unigrad", "balance": 10.0, "decay": 0.8, "correlation_source": "online", "placement": "auto"}
    assert Config(objective=saved).objective == resolve("cifar_subset").objective
