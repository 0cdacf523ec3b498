"""The configuration tree: recipes, overrides, round trip, and what is refused with which words."""

import string
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from unigrad_fast.config import Config, Scope, load_recipe, resolve, scope_of, to_yaml
from unigrad_fast.pipelines import preset_views
from unigrad_fast.recipes import recipe_names
from unigrad_fast.runtime import strict_yaml
from unigrad_fast.runtime.errors import UserError
from unigrad_fast.runtime.older_names import note
from unigrad_fast.runtime.trees import merge, parse_arguments
from unigrad_fast.runtime.validation import Node, keys, validate
from unigrad_fast.training.same_run import contradictions


def refusal(*arguments: str) -> list[str]:
    """Lines of the error that command-line arguments raise."""
    with pytest.raises(UserError) as caught:
        resolve(overrides=arguments)
    return str(caught.value).splitlines()


def groups(model: type[Node]) -> list[type[Node]]:
    below = [field.annotation for field in model.model_fields.values()]
    below = [group for group in below if isinstance(group, type) and issubclass(group, Node)]
    return [model, *(group for child in below for group in groups(child))]


def test_every_field_has_a_description():
    missing = [
        f"{group.__name__}.{name}"
        for group in groups(Config)
        for name, field in group.model_fields.items()
        if not field.description
    ]
    assert missing == []


def test_defaults_are_the_imagenet_recipe():
    assert resolve() == Config() == resolve("imagenet_100ep")


def test_imagenet_recipe_is_the_papers_table():
    config = resolve("imagenet_100ep")
    assert config.optimizer.base_lr * config.data.batch_size / 256 == pytest.approx(0.2)
    assert (config.optimizer.name, config.optimizer.weight_decay, config.optimizer.momentum) == (
        "sgd",
        1e-4,
        0.9,
    )
    assert (config.schedule.kind, config.schedule.warmup_epochs, config.schedule.epochs) == ("cosine", 5, 100)
    assert (config.model.backbone, config.model.projector.depth, config.model.projector.width) == (
        "resnet50",
        3,
        2048,
    )
    assert (config.target.momentum, config.target.final_momentum) == (0.996, 1)
    assert (config.objective.balance, config.objective.decay, config.data.batch_size) == (100, 0.99, 1024)


@pytest.mark.parametrize(
    "name, mixed, views", [("cutmix", 1.0, 2), ("multicrop", 0.0, 8), ("cutmix_multicrop", 1.0, 8)]
)
def test_imagenet_recipes_with_augmentations_differ_in_nothing_else(name, mixed, views):
    config, plain = resolve(f"imagenet_100ep_{name}"), resolve("imagenet_100ep")
    assert (config.data.cutmix.probability, len(config.data.views())) == (mixed, views)
    if views == 8:
        assert [(view.size, view.scale) for view in config.data.views()] == [(224, (0.4, 1))] * 2 + [
            (96, (0.05, 0.4))
        ] * 6
    assert config.model_copy(update={"recipe": plain.recipe, "data": plain.data}) == plain


@pytest.mark.parametrize(
    "name, mixed, views",
    [("", 0.0, 2), ("_cutmix", 1.0, 2), ("_multicrop", 0.0, 8), ("_cutmix_multicrop", 1.0, 8)],
)
def test_the_800_epoch_recipes_are_the_papers_second_setting(name, mixed, views):
    """The rest is as for 100 epochs."""
    config, short = resolve(f"imagenet_800ep{name}"), resolve(f"imagenet_100ep{name}")
    descent = config.optimizer
    assert (descent.name, descent.momentum, descent.weight_decay, descent.clip_norm) == ("lars", 0.9, 1e-6, 0)
    assert (descent.base_lr, descent.bias_base_lr, descent.exclude_bias_and_norm) == (0.3, 0.05, True)
    assert (config.schedule.epochs, config.schedule.warmup_epochs, config.schedule.kind) == (800, 10, "cosine")
    assert (config.data.batch_size, config.model.projector.width, config.model.projector.depth) == (4096, 8192, 3)
    assert (config.data.cutmix.probability, len(config.data.views())) == (mixed, views)
    assert (config.target, config.objective, config.engine) == (short.target, short.objective, short.engine)
    assert config.data.model_copy(update={"batch_size": 1024}) == short.data
    config.check_world(32)


def test_the_wide_recipe_differs_in_width_and_in_how_its_memory_is_shared():
    config, plain = resolve("width_16384"), resolve("imagenet_100ep")
    assert (config.model.projector.width, config.engine.zero_stage) == (16384, 2)
    alike = {name: getattr(plain, name) for name in ("recipe", "model", "engine")}
    assert config.model_copy(update=alike) == plain


def test_views_can_be_changed_one_by_one_from_the_command_line():
    views = resolve(
        overrides=(
            *("--data.preset", "byol", "--data.local_crops", "3", "--data.local_views.size", "64"),
            *("--data.global_views.scale", "0.3,1", "--data.global_views.jitter", "[0.1, 0.2, 0.3, 0]"),
            *("--data.second_view.blur_probability", "0.7", "--data.local_views.interpolation", "bicubic"),
        )
    ).data.views()
    assert [view.size for view in views] == [224, 224, 64, 64, 64]
    assert {view.scale for view in views[:2]} == {(0.3, 1.0)} and {view.scale for view in views[2:]} == {(0.05, 0.4)}
    assert [view.blur_probability for view in views] == [1.0, 0.7, 0.5, 0.5, 0.5]
    assert [view.solarize_probability for view in views] == [0, 0.2, 0, 0, 0]
    assert views[0].jitter == (0.1, 0.2, 0.3, 0.0) and views[2].interpolation == "bicubic"


def test_an_unchanged_view_group_is_the_preset():
    assert resolve(overrides=("--data.preset", "swav")).data.views() == preset_views("swav")


def test_growing_views_are_off_by_default_and_begin_where_they_are_told():
    assert resolve().data.growth() is None
    growth = resolve(overrides=("--data.progressive.start_size", "128")).data.growth()
    views = resolve().data.views()
    assert [growth.views(views, epoch)[0].size for epoch in (0, 30, 60, 99)] == [128, 176, 224, 224]


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("--data.global_views.scale", "0.3"), ["data.global_views.scale", "2 comma-separated numbers"]),
        (("--data.global_views.scale", "0.9,0.3"), ["scale = 0.9,0.3: low exceeds high; swap them"]),
        (("--data.second_view.flip_probability", "2"), ["data.second_view.flip_probability = 2", "from 0 to 1"]),
        (("--data.progressive.start_size", "300"), ["from 300 to 224"]),
        (
            ("--data.preset", "multicrop", "--data.image_size", "48"),
            ["data.local_views.size = 96", "larger than the global views", "use about 21"],
        ),
        (("--data.local_view.size", "64"), ["did you mean data.local_views.size?"]),
        (("--data.local_views.size", "64"), ["data.local_views.size = 64", "simsiam has no local views"]),
        (
            ("--data.progressive.start_size", "128", "--schedule.epochs", "50"),
            ["data.progressive.epochs = 60", "schedule.epochs = 50", "use about 30"],
        ),
    ],
)
def test_impossible_views_are_refused_with_a_remedy(arguments, words):
    (line,) = refusal(*arguments)
    assert all(word in line for word in words)


@pytest.mark.parametrize("name", recipe_names())
def test_printed_tree_can_be_fed_back(name, tmp_path):
    config = resolve(name, ["--seed", "3", "--output", str(tmp_path / "run"), "--optimizer.weight_decay", "1e-05"])
    file = tmp_path / "printed.yaml"
    file.write_text(to_yaml(config))
    assert resolve(file) == config
    assert to_yaml(resolve(file)) == to_yaml(config)


@pytest.mark.parametrize("name", recipe_names())
def test_recipes_hold_only_known_keys_and_their_own_name(name):
    assert load_recipe(name)["recipe"] == resolve(name).recipe == name


def test_recipe_file_lies_over_the_recipe_that_it_names(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("recipe: cifar_subset\nmodel: {projector: {width: 64}}\n")
    config = resolve(file)
    assert config.model.projector.width == 64
    assert config.model.projector.depth == 3
    assert config.data.batch_size == resolve("cifar_subset").data.batch_size


def test_dotted_keys_are_groups_in_python_and_in_files_and_may_stand_beside_nested_ones(tmp_path):
    data = {"batch_size": 64, "global_views.flip_probability": 0.25, "global_views": {"scale": (0.3, 1)}}
    config = resolve(
        "quickstart", {"data": data, "data.batch_size": 64, "data.global_views.scale": (0.3, 1), "seed": 3}
    )
    assert (config.data.batch_size, config.seed) == (64, 3)
    views = config.data.global_views
    assert (views.flip_probability, views.scale) == (0.25, (0.3, 1.0))
    (tmp_path / "mine.yaml").write_text("recipe: quickstart\nmodel.projector: {depth: 3}\nmodel.projector.width: 64\n")
    projector = resolve(tmp_path / "mine.yaml").model.projector
    assert (projector.depth, projector.width) == (3, 64)


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({"data.batch_size": 64, "data": {"batch_size": 32}}, "data.batch_size: given twice, as 64 and as 32"),
        ({"data": {"cutmix.alpha": 1, "cutmix": {"alpha": 2}}}, "data.cutmix.alpha: given twice, as 1 and as 2"),
        ({"data": 5, "data.batch_size": 64}, r"data: given twice, as 5 and as {'batch_size': 64}"),
    ],
)
def test_a_key_that_is_given_dotted_and_nested_with_different_values_is_refused(tree, said, tmp_path):
    with pytest.raises(UserError) as caught:
        resolve("quickstart", tree)
    assert str(caught.value) == f"{said}; give it once"
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(tree))
    with pytest.raises(UserError) as caught:
        resolve(tmp_path / "mine.yaml")
    assert str(caught.value).startswith(f"recipe = {tmp_path}/mine.yaml: {said.partition(':')[0]}: given twice, as ")


def test_recipe_file_lies_over_another_file_wherever_it_is_used_from(tmp_path, monkeypatch):
    (tmp_path / "bases").mkdir()
    (tmp_path / "bases/base.yaml").write_text("recipe: cifar_subset\nseed: 5\nmodel: {projector: {width: 64}}\n")
    (tmp_path / "middle.yml").write_text("recipe: bases/base.yaml\nseed: 6\n")
    (tmp_path / "mine.yaml").write_text(f"recipe: {tmp_path}/middle.yml\ndata: {{batch_size: 32}}\n")
    config = resolve(tmp_path / "mine.yaml")
    assert config == resolve(
        "cifar_subset", {"seed": 6, "model": {"projector": {"width": 64}}, "data": {"batch_size": 32}}
    )
    assert config.recipe == "cifar_subset"
    (tmp_path / "saved.yaml").write_text(to_yaml(config))
    (tmp_path / "bases/base.yaml").unlink()
    assert resolve(tmp_path / "saved.yaml") == config
    with pytest.raises(UserError) as caught:
        resolve(tmp_path / "mine.yaml")
    said = str(caught.value)
    assert said.startswith(f"recipe = {tmp_path}/bases/base.yaml: no such file or shipped recipe")
    assert said.endswith(f"{tmp_path}/middle.yml names it")


def test_recipes_in_a_circle_are_refused_with_the_chain(tmp_path):
    for name, base in (("a", "b"), ("b", "c"), ("c", "../" + tmp_path.name + "/b")):
        (tmp_path / f"{name}.yaml").write_text(f"recipe: {base}.yaml\n")
    with pytest.raises(UserError) as caught:
        resolve(tmp_path / "a.yaml")
    chain = " -> ".join(f"{tmp_path}/{name}.yaml" for name in "abcb")
    assert str(caught.value) == f"recipe = {tmp_path}/a.yaml: recipes refer to each other: {chain}"


def test_empty_recipe_file_is_the_default_recipe(tmp_path):
    file = tmp_path / "empty.yaml"
    file.write_text("# nothing\n")
    assert resolve(file) == Config()


@pytest.mark.parametrize("source", ["arguments", "mapping", "file"])
def test_data_recipe_is_the_older_name_of_data_preset_and_says_so_once(source, tmp_path, capsys):
    (tmp_path / "my.yaml").write_text("recipe: imagenet_100ep\ndata: {recipe: byol}\n")
    given = {
        "arguments": (None, ["--data.recipe", "byol"]),
        "mapping": (None, {"data": {"recipe": "byol"}}),
        "file": (tmp_path / "my.yaml", ()),
    }
    note.cache_clear()
    for _ in range(2):
        assert resolve(*given[source]) == resolve(overrides=["--data.preset", "byol"])
    assert capsys.readouterr().err == "note: data.recipe is now data.preset\n"


def test_only_the_first_rank_says_that_a_key_was_renamed(monkeypatch, capsys):
    note.cache_clear()
    monkeypatch.setenv("RANK", "1")
    resolve(overrides=["--data.recipe", "byol"])
    assert capsys.readouterr().err == ""


def test_a_key_and_its_older_name_may_be_given_together_only_with_one_value(tmp_path):
    assert resolve(overrides=["--data.recipe", "byol", "--data.preset", "byol"]).data.preset == "byol"
    assert refusal("--data.recipe", "byol", "--data.preset", "swav") == [
        "data.recipe = byol: is the former name of data.preset, which is swav; leave data.recipe out"
    ]
    (tmp_path / "my.yaml").write_text("data: {recipe: byol}\n")  # a layer below the command line
    assert resolve(tmp_path / "my.yaml", ["--data.preset", "swav"]).data.preset == "swav"


def test_a_configuration_that_an_earlier_version_saved_is_read_without_a_note(capsys):
    note.cache_clear()
    saved = resolve(overrides={"data": {"preset": "byol"}}).model_dump(mode="json")
    earlier = {**saved, "data": {"recipe": saved["data"].pop("preset"), **saved["data"]}}
    assert validate(Config, earlier).data.preset == "byol"
    assert contradictions(validate(Config, earlier), earlier, "the checkpoint") == []
    assert contradictions(resolve(), earlier, "the checkpoint") == [
        "data.preset = simsiam: the checkpoint has byol",
    ]
    assert capsys.readouterr().err == ""


def test_command_line_lies_over_the_recipe():
    config = resolve(
        overrides=["--recipe", "cifar_subset", "--data.batch-size=256", "--model.sync_batch_norm", "false"]
    )
    assert (config.recipe, config.data.batch_size, config.model.sync_batch_norm) == (
        "cifar_subset",
        256,
        False,
    )


def test_mapping_and_arguments_give_the_same_tree():
    assert resolve("quickstart", {"evaluation": {"knn": {"k": 5}}}) == resolve(
        "quickstart", ["--evaluation.knn.k", "5"]
    )


@pytest.mark.parametrize(("word", "value"), [("true", True), ("True", True), ("false", False)])
def test_booleans_take_true_and_false(word, value):
    assert resolve(overrides=["--telemetry.tensorboard", word]).telemetry.tensorboard is value


@pytest.mark.parametrize("word", ["1e3", "1000.0", "1_000", "1000", "+1.0E3"])
def test_whole_numbers_may_be_written_as_people_write_them(word, tmp_path):
    (tmp_path / "mine.yaml").write_text(f"data: {{batch_size: {word}}}\nevaluation: {{knn: {{k: {word}}}}}\n")
    for config in (resolve(tmp_path / "mine.yaml"), resolve(overrides=["--data.batch_size", word])):
        assert config.data.batch_size == 1000
    assert resolve(overrides=["--evaluation.knn.k", word]).evaluation.knn.k == 1000


def test_aliases_and_merged_keys_of_yaml_may_be_used(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("a: &a {epochs: 7, warmup_epochs: 1}\nschedule: {<<: *a, warmup_epochs: 2}\n")
    assert strict_yaml.read(file.read_text())["schedule"] == {"epochs": 7, "warmup_epochs": 2}


def test_bare_switch_is_true_and_null_is_none():
    config = resolve("quickstart", ["--optimizer.exclude_bias_and_norm", "--data.val", "null"])
    assert config.optimizer.exclude_bias_and_norm is True
    assert config.data.val is None


def test_numbers_may_be_written_in_scientific_notation_in_yaml(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("optimizer: {weight_decay: 1e-6}\n")  # YAML 1.1 reads a text here
    assert resolve(file).optimizer.weight_decay == 1e-6


def test_paths_become_absolute(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert resolve(overrides=["--data.train", "images"]).data.train == tmp_path / "images"


def test_a_path_may_look_like_a_number(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert resolve(overrides=["--output", "2024"]).output == tmp_path / "2024"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--model.projector.depth 0", "model.projector.depth = 0: must be an integer from 1 to 5"),
        (
            "--model.projector.dept 3",
            "model.projector.dept = 3: unknown key; did you mean model.projector.depth?",
        ),
        ("--width 3", "width = 3: unknown key; did you mean model.projector.width?"),
        ("--optimizer.lr 3", "optimizer.lr = 3: unknown key; did you mean optimizer.base_lr?"),
        ("--training.epochs 3", "training.epochs = 3: unknown key; did you mean schedule.epochs?"),
        ("--epochs 3", "epochs = 3: unknown key; did you mean schedule.epochs?"),
        (
            "--data.progresive.epochs 3",
            "data.progresive.epochs = 3: unknown key; did you mean data.progressive.epochs?",
        ),
        ("--frobnicate 3", "frobnicate = 3: unknown key; valid keys are seed, output, "),
        ("--modl.backbone resnet18", "modl.backbone = resnet18: unknown key; did you mean model.backbone?"),
        ("--optimizer.base_lr nan", "optimizer.base_lr = nan: must be a number above 0"),
        ("--optimizer.weight_decay inf", "optimizer.weight_decay = inf: must be a number of at least 0"),
        ("--evaluation.knn.k 0", "evaluation.knn.k = 0: must be an integer of at least 1 or auto"),
        ("--engine.zero_stage 3", "engine.zero_stage = 3: must be an integer from 0 to 2"),
        ("--seed true", "seed = true: must be an integer from 0 to 4294967295"),
        ("--data.batch_size 12.5", "data.batch_size = 12.5: must be an integer from 2"),
        ("--telemetry.tensorboard 1", "telemetry.tensorboard = 1: must be true or false"),
        (
            "--engine.precision bf15",
            "engine.precision = bf15: must be one of auto, bf16, fp16, fp32; did you mean bf16?",
        ),
        ("--data.train=", "data.train = '': must be a path or null"),
        ("--data.batch_size", "--data.batch_size: a value is missing; it must be an integer from 2 to 16777216"),
        ("--recipe --seed 3", "--recipe: a value is missing; give the path of a YAML file or one of "),
        ("--recipe=", "--recipe: a value is missing; give the path of a YAML file or one of "),
        ("--recipe /", "recipe = /: is not a text file; give the path of a YAML file"),
        ("--data.batch_size 1e300", "data.batch_size = 1e300: must be an integer from 2 to 16777216"),
        ("--seed 1.5e0", "seed = 1.5e0: must be an integer from 0 to 4294967295"),
        ("--evaluation.crop_fraction 1e-9", "evaluation.crop_fraction = 1e-09: a crop of 224 pixels would need images"),
        ("--evaluation.knn.temperature 1e-50", "evaluation.knn.temperature = 1e-50: must be a number from 0.001"),
        ("--data.global_views.blur_sigma 0.1,1e9", "data: blur_sigma (0.1, 1000000000.0) is out of range; use 0.01 to"),
        ("--data.local_views.ratio 1e-9,1 --data.local_crops 2", "data: ratio (1e-09, 1.0) is out of range; use 0.01"),
        ("--checkpoint.every 1e308", "checkpoint.every = 1e308: must be a number above 0 to 1e+06"),
        ("--output --seed 3", "--output: a value is missing; it must be a path or null"),
        ("--schedule.epochs null", "schedule.epochs = null: must be an integer from 1"),
        (
            "--model.projector 3",
            "model.projector = 3: a group; its keys are depth, width",
        ),
        (
            "--schedule.warmup_epochs 101",
            "schedule.warmup_epochs = 101: more than schedule.epochs; use 0 to 100",
        ),
        (
            "--target.final_momentum 0.9",
            "target.final_momentum = 0.9: less than target.momentum; use 0.996 to 1",
        ),
        (
            "--optimizer.trust_coefficient 0.02",
            "optimizer.trust_coefficient = 0.02: applies only to lars, but optimizer.name is sgd; leave it out, or use "
            "optimizer.name lars",
        ),
        (
            "--optimizer.name lars --optimizer.second_momentum 0.95",
            "optimizer.second_momentum = 0.95: applies only to adamw, but optimizer.name is lars; leave it out, or use "
            "optimizer.name adamw",
        ),
        (
            "--data.batch_size 100 --engine.accumulation_steps 8",
            "data.batch_size = 100: does not divide over 1 rank x 8 accumulation steps; use 96 or 104",
        ),
        ("--recipe quikstart", "recipe = quikstart: no such file or shipped recipe; "),
        ("resnet50", "resnet50: unexpected argument; options are written --key value"),
        ("--seed 1 --seed.x 2", "--seed.x: seed was already given a value, but it is a group of keys"),
    ],
)
def test_refusal_names_key_value_and_remedy(arguments, message):
    assert refusal(*arguments.split())[0].startswith(message)


def test_a_recipe_for_lars_takes_another_optimizer():
    assert resolve("imagenet_800ep", ["--optimizer.name", "sgd"]).optimizer.trust_coefficient == 0.001


def test_all_problems_are_reported_at_once():
    lines = refusal("--model.projector.depth", "0", "--lr", "1", "--schedule.kind", "linear", "--seed", "-1")
    assert {line.partition(" = ")[0] for line in lines} == {
        "model.projector.depth",
        "lr",
        "schedule.kind",
        "seed",
    }


def test_all_impossible_combinations_are_reported_at_once():
    words = "--schedule.warmup_epochs 200 --target.final_momentum 0 --data.batch_size 3 --engine.accumulation_steps 2"
    lines = refusal(*words.split())
    assert len(lines) == 3


LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n" for before, name in ("ab", "bc", "cd", "de", "ef", "fg")
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "model: {projector: {depth: 0}}",
            "model.projector.depth = 0: must be an integer from 1 to 5",
        ),
        ("model: [1]", "model = [1]: a group; its keys are backbone, "),
        ("optimizer: {base_lr: .nan}", "optimizer.base_lr = nan: must be a number above 0"),
        ("seed: {a: 1}", 'seed = {"a": 1}: must be an integer from 0'),
        ("1: 2", "1 = 2: unknown key; valid keys are seed, "),
        ("- 3", "recipe = FILE: holds [3]; a recipe must be a tree of keys and values"),
        ("a: [1", "recipe = FILE: not valid YAML in line 1, column 6: "),
        ("recipe: quikstart", "recipe = quikstart: not a shipped recipe; use one of "),
        ("recipe: [quickstart]", 'recipe = ["quickstart"]: must be a string'),
        (
            "seed: 1\ndata: {}\nseed: 2",
            "recipe = FILE: not valid YAML in line 3, column 1: seed is given twice, in lines 1 and 3; remove one",
        ),
        (
            "a: {b: 1,\n    b: 1}",
            "recipe = FILE: not valid YAML in line 2, column 5: b is given twice, in lines 1 and 2",
        ),
        ("data: &d\n  train: *d", "recipe = FILE: not valid YAML in line 2, column 10: alias *d is inside its own"),
        (LAUGHS, "recipe = FILE: not valid YAML in line 5, column 36: more than 100,000 values, counting those that"),
        ("a: " + "[" * 5000, "recipe = FILE: not valid YAML: nested too deeply"),
        (
            "seed: 010",
            "recipe = FILE: not valid YAML in line 1, column 7: YAML reads 010 as 8, in base 8; write 8, or 10, or "
            "'010' in quotes for text",
        ),
        (
            "model: {width: -0_17}",
            "recipe = FILE: not valid YAML in line 1, column 16: YAML reads -0_17 as -15, in base 8; ",
        ),
        (
            "engine:\n  timeout: 1:30",
            "recipe = FILE: not valid YAML in line 2, column 12: YAML reads 1:30 as 90, in base 60; write 90, or "
            "'1:30' in quotes for text",
        ),
        (
            "1:30.5: 2",
            "recipe = FILE: not valid YAML in line 1, column 1: YAML reads 1:30.5 as 90.5, in base 60",
        ),
        ("seed: 2020-13-45", "recipe = FILE: not valid YAML: month must be in 1..12"),
    ],
)
def test_recipe_files_are_refused_in_the_same_words(text, message, tmp_path):
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    assert refusal("--recipe", str(file))[0].replace(str(file), "FILE").startswith(message)


def test_numbers_that_mean_the_same_to_a_reader_and_to_yaml_are_taken(tmp_path):
    file = tmp_path / "numbers.yaml"
    file.write_text(
        "seed: 0\ndata: {batch_size: 1_024}\nmodel: {projector: {width: 0x400}}\noptimizer: {base_lr: 00.5}"
    )
    config = resolve(file, {"output": "/nowhere", "data": {"train": "/nowhere"}})
    assert (config.data.batch_size, config.model.projector.width, config.optimizer.base_lr) == (1024, 1024, 0.5)


def test_binary_recipe_file_is_refused(tmp_path):
    file = tmp_path / "weights.yaml"
    file.write_bytes(b"\xff\xfe\x00\x80")
    assert "cannot be read as text" in refusal("--recipe", str(file))[0]


@pytest.mark.parametrize(("batch", "ranks", "remedy"), [(100, 8, "96 or 104"), (4, 8, "8"), (1024, 3, "1023 or 1026")])
def test_batch_that_does_not_divide_over_ranks_names_the_nearest(batch, ranks, remedy):
    with pytest.raises(
        UserError, match=f"{batch}: does not divide over {ranks} ranks x 1 accumulation step; use {remedy}"
    ):
        resolve(overrides={"data": {"batch_size": batch}}).check_world(ranks)


def test_one_image_per_rank_is_refused_without_synchronised_batch_norm():
    config = resolve(overrides={"data": {"batch_size": 4}, "model": {"sync_batch_norm": False}})
    config.check_world(2)
    with pytest.raises(UserError, match="is too small for 4 ranks x 1 accumulation step; use 8"):
        config.check_world(4)


def test_compiled_networks_are_refused_where_batch_norm_meets_other_ranks():
    for ranks, synchronised in ((1, True), (2, False)):
        resolve(overrides={"engine": {"compile": True}, "model": {"sync_batch_norm": synchronised}}).check_world(ranks)
    with pytest.raises(UserError, match=r"engine\.compile = true: with 2 ranks .*; leave it out, or set"):
        resolve(overrides={"engine": {"compile": True}}).check_world(2)


@given(batch=st.integers(2, 300), ranks=st.integers(1, 9), steps=st.integers(1, 9), synchronised=st.booleans())
def test_every_batch_size_that_is_suggested_is_accepted(batch, ranks, steps, synchronised):
    def problems(size: int) -> list[str]:
        tree = {
            "data": {"batch_size": size},
            "engine": {"accumulation_steps": steps},
            "model": {"sync_batch_norm": synchronised},
        }
        try:
            resolve(overrides=tree).check_world(ranks)
        except UserError as error:
            return str(error).splitlines()
        return []

    for line in problems(batch):
        assert line.startswith("data.batch_size")
        # On one rank the combination is checked with the tree, where the number of ranks is not known.
        if f"{ranks} rank" in line:
            assert all(problems(int(size)) == [] for size in line.partition("; use ")[2].split(" or "))


def nested(flat: dict[str, object]) -> dict[str, object]:
    """A tree from dotted keys."""
    tree: dict[str, object] = {}
    for key, value in flat.items():
        *path, leaf = key.split(".")
        place = tree
        for part in path:
            place = place.setdefault(part, {})
        place[leaf] = value
    return tree


flat_trees = st.dictionaries(st.sampled_from(sorted(keys(Config))), st.integers(0, 9), max_size=6)


@given(flat_trees, flat_trees)
def test_merge_takes_the_top_value_of_each_key(base, top):
    assert merge(nested(base), nested(top)) == nested({**base, **top})


@pytest.mark.long
@given(
    st.sampled_from(sorted(keys(Config))),
    st.text(string.printable, max_size=12) | st.floats() | st.none() | st.booleans() | flat_trees,
)
def test_any_value_of_any_key_is_accepted_or_refused_by_name(key, value):
    try:
        config = resolve(overrides=nested({key: value}))
    except UserError as error:
        assert str(error)
    else:
        assert Config.model_validate(yaml.safe_load(to_yaml(config))) == config


def test_arguments_parse_in_all_forms():
    words = ["runs/a", "--a.b", "1", "--a.c=x=y", "--switch", "--last", "-3"]
    assert parse_arguments(words, {"run": False}) == {
        "run": "runs/a",
        "a": {"b": "1", "c": "x=y"},
        "switch": True,
        "last": "-3",
    }
    words = ["runs/a", "x.jpg", "--k", "3", "y,z.jpg"]
    assert parse_arguments(words, {"run": False, "images": True}) == {
        "run": "runs/a",
        "images": ["x.jpg", "y,z.jpg"],
        "k": "3",
    }


def test_trees_cannot_be_changed_by_accident():
    with pytest.raises(ValueError, match="frozen"):
        Config().seed = 3
    assert isinstance(resolve("quickstart").data.train, Path)


OF_A_RANK = {
    *{"data.train", "data.val", "data.decode", "data.hw_decoder_load", "data.threads"},
    *{"data.read_threads", "data.read_ahead", "data.read_timeout"},
}
OF_THE_MACHINE = {
    *{"output", "recipe", "data.max_bad_fraction", "objective.placement", "engine.device", "engine.timeout"},
    *{"engine.zero_stage", "engine.recompute_projector", "engine.deterministic", "engine.max_skipped_steps"},
    *{
        "engine.threads",
        "engine.target_stream",
        "engine.cuda_graph",
        "checkpoint.every",
        "checkpoint.keep",
        "checkpoint.keep_every",
    },
    *{"evaluation.every", "evaluation.at_start", "evaluation.crop_fraction", "evaluation.batch_size"},
    *{"evaluation.knn.k", "evaluation.knn.temperature"},
    *{key for key in keys(Config) if key.startswith("telemetry.")},
    *OF_A_RANK,
}
OF_AN_EVALUATION = {
    *{"seed", "data.train", "data.val", "data.image_size", "engine.precision", "engine.tf32"},
    *{"model.backbone", "model.stem", "model.projector.depth", "model.projector.width"},
    *{"model.sync_batch_norm", "model.batch_statistics"},
    *{"evaluation.crop_fraction", "evaluation.knn.k", "evaluation.knn.temperature"},
}
OF_ANOTHER_MACHINE = {
    *{"data.decode", "data.threads", "data.read_threads", "data.read_ahead", "data.read_timeout"},
    *{"data.max_bad_fraction", "evaluation.batch_size", "engine.device", "engine.zero_stage"},
}


@pytest.mark.parametrize(
    ("scope", "expected"),
    [
        (Scope.RANK, OF_A_RANK),
        (Scope.MACHINE, OF_THE_MACHINE),
        (Scope.JUDGMENT, OF_AN_EVALUATION),
        (Scope.LOCAL, OF_ANOTHER_MACHINE),
    ],
)
def test_these_keys_have_a_scope_and_all_others_decide_the_result(scope, expected):
    assert {key for key in keys(Config) if scope in scope_of(key)} == expected


def test_a_key_that_no_field_declares_decides_the_result():
    assert scope_of("objective.of_another_version") == scope_of("nothing.like.it") == Scope.RESULT
    assert Scope.MACHINE in scope_of("telemetry.of_another_version")
