"""The members of a comparison: the grid as data, the commands, and what is refused before anything starts."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

from unigrad_fast import cli
from unigrad_fast.commands.compare import Compare
from unigrad_fast.comparison.members import Asked
from unigrad_fast.comparison.paper_values import ROWS, TABLES, of_method
from unigrad_fast.comparison.session import Session
from unigrad_fast.config import resolve
from unigrad_fast.networks.encoder import build_encoder
from unigrad_fast.objectives.catalogue import FORMS
from unigrad_fast.pipelines import order
from unigrad_fast.runtime.errors import UserError
from unigrad_fast.runtime.trees import parse_arguments
from unigrad_fast.runtime.validation import leaves, validate

HERE = Path("/there")


def members(**asked):
    return Asked(common={"recipe": "quickstart"}, **asked).members(HERE)


AXES = some.fixed_dictionaries(
    {
        "methods": some.lists(some.sampled_from(["unigrad", "simclr", "b", "e", "barlow_twins"]), unique=True),
        "targets": some.lists(some.sampled_from(["momentum", "stop_gradient", "mixed"]), unique=True),
        "sweep": some.dictionaries(
            some.sampled_from(["model.projector.depth", "optimizer.base_lr", "schedule.epochs"]),
            some.lists(some.integers(1, 5), min_size=1, max_size=3, unique=True),
            max_size=2,
        ),
        "seeds": some.lists(some.integers(0, 9), min_size=1, max_size=3, unique=True),
    }
)


@settings(max_examples=15)
@given(AXES)
def test_a_grid_has_every_combination_once_with_the_keys_that_it_names(axes):
    if not (axes["methods"] or axes["targets"] or axes["sweep"]):
        return
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in axes.items()}
    found = members(**given)
    lengths = [len(values) for values in (axes["methods"], axes["targets"], *axes["sweep"].values()) if values]
    assert len(found) == torch.tensor(lengths).prod() * len(axes["seeds"])
    assert len({member.config.output for member in found}) == len(found)
    lines = {str(member.line) for member in found}
    assert len(lines) == len(found) // len(axes["seeds"])
    for key, values in axes["sweep"].items():
        assert {dict(leaves(member.config))[key] for member in found} == set(values)
    assert [member.seed for member in found] == sorted(
        axes["seeds"] * (len(found) // len(axes["seeds"])), key=axes["seeds"].index
    )


def test_the_command_of_a_member_gives_its_configuration():
    asked = {"methods": ("unigrad", "byol", "e"), "sweep": {"optimizer.base_lr": ["0.1", 3e-7], "data.val": [None]}}
    for member in members(**asked, seeds=(0, 7)):
        command, *words = member.words
        assert command == "pretrain"
        assert resolve(overrides=parse_arguments(words)) == member.config


def test_every_key_of_the_comparison_is_a_key_of_each_member():
    found = Asked(
        methods=("byol", "c"),
        common={"recipe": "quickstart", "data": {"batch_size": "32", "global_views": {"scale": "0.5,1"}}},
    ).members(HERE)
    assert [member.name for member in found] == ["byol-seed-0", "row-c-seed-0"]
    for member in found:
        assert member.config.data.batch_size == 32
        assert ("--data.global_views.scale", "0.5,1.0") in itertools.pairwise(member.words)


@pytest.mark.parametrize("table", TABLES)
def test_every_table_of_the_paper_can_be_asked_for(table):
    """On the recipe that it was made with, and on that of the drawn images."""
    for recipe in ("imagenet_100ep", "quickstart", "cifar_subset"):
        found = Asked(table=table, common={"recipe": recipe}).members(HERE)
        assert found
        assert all(line.paper for line in TABLES[table].lines)
        assert all({*line.paper} == {*TABLES[table].figures} for line in TABLES[table].lines)


def test_the_tables_train_what_the_paper_names():
    forms = {member.line.name: member.config.objective for member in Asked(table="methods").members(HERE)}
    assert [form.row for form in forms.values()] == list(ROWS)
    members = {member.line.name: member.config.objective for member in Asked(table="target").members(HERE)}
    assert len(members) == 8  # the negatives of row j come from the online branch, with momentum as mixed
    for name, objective in members.items():
        _, row, target = name.split("-")
        assert objective.row == row
        assert objective.target == ("stop_gradient" if target == "stop_gradient" else "momentum")
        if row != "j" and target != "stop_gradient":
            assert objective.negative_target == ("stop_gradient" if target == "mixed" else "target")
        if row == "e" and target != "stop_gradient":
            assert objective.correlation_source == ("online" if target == "mixed" else "target")
    both, one, full, paper = Asked(table="simplified").members(HERE)
    assert [member.config.objective.both_terms for member in (both, one)] == [True, False]
    assert [member.config.objective.eigen_predictor for member in (full, paper)] == ["full", "paper"]


def test_the_papers_value_of_a_method_is_that_of_its_row():
    """In the table of target branches if one is given, and in that of methods otherwise."""
    assert of_method("unigrad", None) == of_method("e", None) == of_method("e", "mixed") == {"linear": 70.3}
    assert of_method("unigrad", "momentum") == {"linear": 70.2}
    assert of_method("original barlow_twins", "momentum") == {"linear": 69.0}
    assert of_method("barlow_twins", None) == of_method("barlow_twins", "momentum") == {"linear": 70.0}
    assert of_method("vicreg", "stop_gradient") == {"linear": 67.6}
    assert of_method("original simclr", "stop_gradient") == of_method("original simsiam", None) == {}
    assert of_method("a", "mixed") == of_method("b", "weight_sharing") == {}


def test_all_methods_with_both_forms_are_all_forms_of_the_catalogue_but_the_rows():
    found = members(methods=("all",), forms=("gradient", "original"))
    assert len(found) == len([name for name in FORMS if name not in ROWS])


REFUSED = {
    "--methods byoll": "methods = byoll: must be one of",
    "--methods unigrad,unigrad": "methods = unigrad,unigrad: unigrad is given twice; give it once",
    "--methods all,moco": "methods = all,moco: all contains every method; leave the others out",
    "--methods byol --forms gradient": "forms = gradient: byol has only the form original",
    "--forms original": "forms = original: applies only with --methods",
    "--targets mixed --methods byol": "targets = mixed: the original of byol has no separate negative samples",
    "--targets weight_sharing --methods byol": "objective.target = weight_sharing: refused for byol",
    "--methods moco --objective.method byol": "objective.method = byol: the comparison sets it itself; leave it out",
    "--methods unigrad,byol --objective.balance 3": "objective.balance = 3: does not apply to the original of byol",
    "--sweep.objective.temperature 1": "objective.temperature = 1: does not apply to unigrad",
    "--sweep.model.projector.dept 1": "model.projector.dept = 1: unknown key; did you mean model.projector.depth?",
    "--sweep.model.projector.depth 1,9": "model.projector.depth = 9: must be an integer from 1 to 5 (in depth-9)",
    "--sweep.model.projector.depth 1,1": "sweep.model.projector.depth = 1,1: 1 is given twice; give it once",
    "--sweep.model.projector.depth": "--sweep.model.projector.depth: values are missing",
    "--sweep.seed 1,2": "sweep.seed: a comparison sets it; use --seeds",
    "--sweep.objective.method moco --methods simclr": "sweep.objective.method: is also set by --methods or --targets",
    "--methods moco --seed 3": "seed = 3: a comparison sets it; use --seeds",
    "--methods moco --output x": "output = x: a comparison sets it; use FOLDER",
    "--methods moco --seeds 1,2,1": "seeds = 1,2,1: 1 is given twice; give it once",
    "--methods moco --bach_size 3": "bach_size = 3: unknown key; did you mean",
    "--methods moco --data.bach_size 3": "data.bach_size = 3: unknown key; did you mean data.batch_size?",
    "--table methods --targets mixed": "table = methods: says what is compared; leave targets out",
    "--table 7": "table = 7: must be one of methods",
    "--schedule.epochs 3": "nothing to compare; give --methods",
    "": "folder = ",
    "--tables_only true": "tables_only = true: no comparison in",
    "--methods moco --data.train nowhere": "data.train = ",
    "--methods moco --data.val null": "data.val = null: a comparison needs labelled validation images",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_compared_is_refused_in_one_line_before_anything_starts(words, recipe, tmp_path, capsys):
    of = [] if words in ("", "--tables_only true") else ["--recipe", str(recipe)]
    assert cli.main(["compare", str(tmp_path / "cmp"), *of, *words.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {REFUSED[words]}")
    assert not (tmp_path / "cmp").exists()


def test_members_begin_with_the_same_backbone_and_see_the_same_images():
    """Whatever differs between them but the backbone itself."""
    depths = members(methods=("unigrad", "moco"), sweep={"model.projector.depth": (1, 3)}, seeds=(4,))
    branches = members(targets=("momentum", "stop_gradient"), methods=("vicreg", "b"), seeds=(4,))
    configs = [member.config for member in (*depths, *branches, *members(methods=("byol",), seeds=(4,)))]
    first, *others = [
        build_encoder(each.model, each.seed, torch.device("cpu")).backbone.state_dict() for each in configs
    ]
    for other in others:
        assert first.keys() == other.keys()
        assert all(torch.equal(first[name], other[name]) for name in first)
    seen = [order.batch_indices(each.seed, 5, 1000, each.data.batch_size) for each in configs]
    assert all(epoch == seen[0][0] and (batch == seen[0][1]).all() for epoch, batch in seen)


def test_what_is_kept_in_a_folder_gives_the_same_members_from_anywhere(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(recipe.parent)
    words = ["--recipe", recipe.name, "--methods", "moco,c", "--targets", "momentum", "--seeds", "1,2"]
    words += ["--sweep.model.projector.depth", "1,2", "--data.train", "train", "--schedule.epochs", "2e0"]
    asked = validate(Compare, parse_arguments(words))
    found = asked.asked().members(HERE)
    from unigrad_fast.comparison.members import written

    kept = asked.kept(written(asked.asked().common, found[0].config))
    monkeypatch.chdir(tmp_path)
    assert [each.config for each in validate(Compare, kept).asked().members(HERE)] == [each.config for each in found]


@pytest.mark.parametrize(
    ("visible", "jobs", "places"), [(None, 2, ["0", "1"]), ("5,7,2", 3, ["5", "7", "2"]), ("5,7", 1, ["5"])]
)
def test_members_side_by_side_have_a_gpu_each(visible, jobs, places, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    this = Session(tmp_path, Asked(methods=("moco",)), members(methods=("moco",)), jobs)
    assert this._places() == [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in places]
    with pytest.raises(UserError, match=r"jobs = 9: this machine has \d GPUs; give at most \d"):
        replace(this, jobs=9)._places()


def test_all_members_compute_with_the_same_threads(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    this = Session(tmp_path, Asked(methods=("moco",)), members(methods=("moco",)), jobs=2)
    assert this._threads({}, None) == {"engine.threads": max(1, torch.get_num_threads() // 2)}
    assert this._threads({}, {"engine.threads": 5}) == {"engine.threads": 5}
    assert this._threads({"engine.threads": 3}, {"engine.threads": 5}) == {}
