"""Every method learns: six epochs on the CIFAR-10 subset, in gradient form and as the original, by kNN; minutes each.

One alone: make test-slow TESTS="tests/accuracy/test_every_method.py -k original-simsiam"
"""

from __future__ import annotations

import pytest
from test_accuracy import train_and_judge, warnings

from unigrad_fast.objectives.catalogue import FORMS as DECLARED
from unigrad_fast.objectives.catalogue import methods

pytestmark = [pytest.mark.slow, pytest.mark.timeout(5400)]

FORMS = [
    *(("gradient", method) for method in methods() if method in DECLARED),
    *(("original", method) for method in methods() if f"original {method}" in DECLARED),
]


@pytest.mark.parametrize(("form", "method"), FORMS)
def test_six_epochs_bring_the_encoder_above_the_untrained_one(cifar_subset, tmp_path, record_property, form, method):
    recipe = "cifar_subset" if method == "unigrad" else f"cifar_subset_{method}"
    choice = ("--objective.form", form, "--schedule.epochs", 6)
    accuracy = train_and_judge(recipe, cifar_subset, tmp_path / "run", record_property, *choice)
    record_property("warnings", len(warnings(tmp_path / "run")))
    assert accuracy["trained encoder"] > accuracy["untrained encoder"]
