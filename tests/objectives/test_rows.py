"""Rows of the table as values: what fits together, and a row of one's own."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from test_forms import WIDTH, gradients
from test_unigrad import views

from unigrad_fast.objectives import ROWS, Row, build

PAGE = Path(__file__).resolve().parents[2] / "docs/methods.md"


def test_the_code_on_the_page_runs_and_its_rows_have_gradients():
    said: dict = {}
    for code in re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        exec(code.replace("width=2048", "width=16").replace("width=256", "width=16"), said)
    for name in ("objective", "own", "other"):
        for seed in range(2):
            found = gradients(said[name], views(seed=seed), views(seed=seed + 1))
        assert found.norm() > 0


def test_a_row_of_ones_own():
    row = Row("l2", "identity", 10.0, "softmax", "bank", "two", temperature=0.1, bank_size=50)
    objective = build(row=row, width=WIDTH, balance=5.0)
    assert objective.row.balance == 5.0 and objective.bank.keys.shape == (50, WIDTH)
    for seed in range(2):
        assert gradients(objective, views(seed=seed), views(seed=seed + 1)).norm() > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"samples": "all"},
            "samples 'all' does not fit: negative 'softmax' takes batch or batch_without_self or bank",
        ),
        ({"positive": "predictor"}, "positive 'predictor' does not fit: W_h is computed from F"),
        ({"positive": "diagonal"}, "positive 'diagonal' does not fit"),
        ({"balance": "dynamic"}, "balance 'dynamic' does not fit"),
        ({"balance": "constant"}, "balance 'constant' is unknown; use a number"),
        ({"balance": -1.0}, "balance -1.0 is out of range"),
        ({"normalisation": "l1"}, "normalisation 'l1' is unknown; use one of l2, batch_norm, none"),
        ({"centred": True}, "centred does not fit"),
        ({"both_terms": True}, "both_terms does not fit"),
        ({"scale": "predictor"}, "scale 'predictor' does not fit"),
        ({"decay": 1.0}, "decay 1.0 is outside"),
        ({"temperature": 0.0}, "temperature 0.0 is out of range; use more than 0"),
    ],
)
def test_parts_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(ROWS["a"], **change)


def test_terms_of_shared_weights_need_them_and_two_views():
    with pytest.raises(ValueError, match="use target='weight_sharing'"):
        build(row="b", width=WIDTH, both_terms=True)
    objective = build(row="b", width=WIDTH, both_terms=True, target="weight_sharing")
    with pytest.raises(ValueError, match="both_terms needs two unmixed global views, not 3"):
        objective(online=views(3), target=views())
