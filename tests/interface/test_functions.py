"""The functions made from the table of commands, and what they return."""

from __future__ import annotations

import html
import inspect
import json
from pathlib import Path

import pytest

import unigrad_fast
from unigrad_fast import Result, UserError, evaluate, export
from unigrad_fast.commands import COMMANDS
from unigrad_fast.interface.results import Picture, Table
from unigrad_fast.runtime.outputs import Written

EVALUATIONS = [name.removeprefix("evaluate ") for name in COMMANDS if name.startswith("evaluate ")]


def test_there_is_a_function_for_every_evaluation():
    assert {*EVALUATIONS} <= {*dir(evaluate)}
    with pytest.raises(AttributeError, match=r"evaluate\.nearest: no such evaluation; there are knn, linear, "):
        _ = evaluate.nearest
    with pytest.raises(AttributeError, match="has no attribute 'prétrain'"):
        _ = getattr(unigrad_fast, "prétrain")  # noqa: B009
    assert {"pretrain", "evaluate", "Run"} <= {*dir(unigrad_fast)}


@pytest.mark.parametrize("name", ["export", *(f"evaluate {name}" for name in EVALUATIONS)])
def test_signature_and_docstring_are_the_commands(name):
    function = export if name == "export" else getattr(evaluate, name.split()[1])
    options = COMMANDS[name][0]
    assert inspect.signature(function).parameters.keys() == options.model_fields.keys()
    assert function.__doc__.startswith(options.__doc__) and "null" not in function.__doc__
    assert all(f"    {key}: " in function.__doc__ for key in options.model_fields)
    first = next(iter(inspect.signature(function).parameters))
    assert first == "run"


def test_a_result_is_what_the_file_has(finished, images):
    result = evaluate.knn(finished, k=1, data={"val": images / "train"}, keep_features=False)
    content = json.loads(result.path.read_text())
    assert {**result.settings, **result.figures} == content
    assert result.accuracy == content["accuracy"]["trained encoder"] == 100.0  # every image finds itself
    assert result.settings["k"] == 1 and result.top5 is None and result.picture is None
    assert "100.00 %" in repr(result) and html.escape(str(result.path)) in result._repr_html_()


def test_pictures_and_lists_come_back_too(finished, images):
    query = images / "val/class0/000.jpg"
    found = evaluate.retrieve(finished, query, k=2)
    assert isinstance(found.picture, Picture) and found.picture._repr_png_().startswith(b"\x89PNG")
    assert evaluate.retrieve(finished, [query], k=2).path == found.path
    assert evaluate.confusion(str(finished.path), of="knn").accuracy is not None
    table = evaluate.list(finished)
    assert isinstance(table, Table) and "confusion of weighted kNN" in table["protocol"]


def test_options_are_checked_as_the_commands_are(finished):
    for call, said in (
        (lambda: evaluate.knn(finished, grids=3), r"^grids = 3: unknown key; did you mean grid\?$"),
        (lambda: evaluate.knn(finished, grid=True, k=3), "^k = 3: the grid does not use it; leave it out$"),
        (lambda: evaluate.linear(), "^run: missing; "),
        (lambda: evaluate.knn(finished, **{"data.vall": "x"}), r"^data\.vall = x: unknown key"),
        (lambda: export(finished, format="onnx"), "^format = onnx: must be one of torchvision, safetensors"),
    ):
        with pytest.raises(UserError, match=said):
            call()
    with pytest.raises(TypeError, match=r"evaluate\.knn\(\) takes at most 1 positional arguments, run; 2 given"):
        evaluate.knn(finished, 20)
    with pytest.raises(TypeError, match=r"evaluate\.knn\(\) got multiple values for run"):
        evaluate.knn(finished, run=finished)


def test_a_table_has_rows_and_columns():
    table = Table([{"step": 1, "loss": 0.5}, {"step": 2, "rank": 3.0}, {"step": 3, "loss": None}])
    assert table.columns == ["step", "loss", "rank"] and table["loss"] == [0.5, None, None]
    assert table[-1] == {"step": 3, "loss": None} and [row["step"] for row in table[1:]] == [2, 3]
    assert repr(table) == "Table(3 rows, last step 3, loss –)" and repr(Table([])) == "Table(0 rows)"
    with pytest.raises(KeyError, match="accuracy: no such column; there are step, loss, rank"):
        table["accuracy"]


def test_markup_in_values_is_shown_as_it_is():
    table = Table([{"<b>": "<script>&"}])
    assert "<th>&lt;b&gt;</th>" in table._repr_html_() and "<td>&lt;script&gt;&amp;</td>" in table._repr_html_()
    long = Table([{"step": number} for number in range(1000)])
    assert len(long._repr_html_()) < 1000 and "of 1,000 rows" in long._repr_html_()
    result = Result(Written(Path("/<i>"), {"protocol": "<k>"}, {"accuracy": {"<a>": 1.0, "trained encoder": 2.0}}))
    assert "<i>" not in result._repr_html_() and "&lt;a&gt;" in result._repr_html_() and result.accuracy == 2.0
