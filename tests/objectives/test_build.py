"""`build`: methods, forms and rows by name."""

from __future__ import annotations

import pytest
import torch
from test_unigrad import views

from unigrad_fast.objectives import ROWS, GradientForm, UniGrad, build
from unigrad_fast.objectives.catalogue import FORMS
from unigrad_fast.objectives.originals import (
    BYOL,
    DINO,
    TWIST,
    BarlowTwins,
    DirectPred,
    MoCo,
    SimCLR,
    SimSiam,
    SwAV,
    VICReg,
)

ORIGINALS = {
    "moco": MoCo,
    "simclr": SimCLR,
    "byol": BYOL,
    "simsiam": SimSiam,
    "byol_directpred": DirectPred,
    "barlow_twins": BarlowTwins,
    "vicreg": VICReg,
    "dino": DINO,
    "twist": TWIST,
    "swav": SwAV,
}
SMALL = {"moco": {"bank_size": 32}} | {method: {"prototypes": 10} for method in ("dino", "twist", "swav")}


@pytest.mark.parametrize("method", ["unigrad", *ORIGINALS])
@pytest.mark.parametrize("target", ["momentum", "stop_gradient", "weight_sharing"])
def test_every_method_has_one_call_and_one_output(method, target):
    for form in ("gradient", "original"):
        named = method if form == "gradient" else f"original {method}"
        if named not in FORMS:
            with pytest.raises(ValueError, match="has no"):
                build(method, width=16, form=form)
            continue
        small = SMALL.get(method, {})
        if target in FORMS[named].refused:
            with pytest.raises(ValueError, match=f"target '{target}' is refused"):
                build(method, width=16, form=form, target=target, **small)
            continue
        objective = build(method, width=16, form=form, target=target, **small)
        assert isinstance(objective, ORIGINALS[method] if form == "original" else (GradientForm, UniGrad))
        online = [view.requires_grad_() for view in views(3, dtype=torch.float32)]
        output = objective(online=online, target=views(seed=1, dtype=torch.float32))
        output.loss.backward()
        assert online[2].grad is not None and output.unit.shape == (12, 16)
        assert torch.isfinite(output.feature_std()) and output.metrics["positive_cosine"].abs() <= 1


def test_names_are_gradient_forms_where_there_are_some_and_rows_the_papers_equation():
    assert isinstance(build("simclr", width=8, temperature=0.1), GradientForm)
    assert isinstance(build("byol", width=8), BYOL) and isinstance(build("simsiam", width=8), SimSiam)
    assert isinstance(build(row="c", width=8), BYOL)
    for letter, row in ROWS.items():
        if letter != "e":
            assert build(row=letter, width=8).row == row
    assert build("simclr", width=8).row.samples == "batch" and build(row="b", width=8).row.samples != "batch"
    assert build("barlow_twins", width=8).row == ROWS["h"] and build("barlow_twins", row="g", width=8).row == ROWS["g"]
    assert build("unigrad", width=8).correlation_source == "target"
    assert build("unigrad", width=8, negative_target="stop_gradient").correlation_source == "online"


@pytest.mark.parametrize(
    ("error", "call", "message"),
    [
        (ValueError, {"method": "mocco"}, "method 'mocco' is unknown; use one of unigrad, moco"),
        (ValueError, {"row": "k"}, "row 'k' is unknown; use one of a, b"),
        (ValueError, {"method": "moco", "row": "b"}, "row = b: belongs to method simclr, not moco"),
        (ValueError, {"method": "simclr", "form": "exact"}, "form 'exact' is unknown; use one of gradient, original"),
        (ValueError, {"row": "b", "form": "original"}, "form = original: row b exists only in the form gradient"),
        (ValueError, {"row": "j", "target": "own"}, "target 'own' is unknown"),
        (ValueError, {"row": "d", "target": "weight_sharing"}, "weight_sharing.* is refused .* become one"),
        (ValueError, {"method": "byol", "target": "weight_sharing"}, "weight_sharing.* is refused .* become one"),
        (ValueError, {"row": ROWS["a"], "method": "moco"}, "leave method and form out"),
        (
            TypeError,
            {"method": "vicreg", "temperature": 0.2},
            "temperature does not apply to vicreg; it takes balance, positive_factor, target",
        ),
        (
            TypeError,
            {"method": "byol", "balance": 2},
            "balance does not apply to the original of byol; it takes predictor",
        ),
        (TypeError, {"row": "a", "decay": 0.9}, "decay does not apply to row a; it takes balance, bank_size"),
        (
            TypeError,
            {"method": "byol", "predictor": None},
            "predictor None is not a module; use True, False or an nn.Module",
        ),
        (ValueError, {"method": "simsiam", "predictor": False, "hidden": 3}, "hidden 3 needs predictor=True"),
        (
            ValueError,
            {"row": "e", "negative_target": "stop_gradient", "correlation_source": "target"},
            "correlation_source 'target' does not fit",
        ),
        (
            ValueError,
            {"row": "d", "negative_target": "stop_gradient", "correlation_source": "target"},
            "correlation_source 'target' does not fit",
        ),
        (ValueError, {"row": "a", "balance": "x"}, "balance 'x' is unknown; use a number"),
        (ValueError, {"method": "moco", "temperature": float("inf")}, "temperature inf is out of range; use a finite"),
        (TypeError, {"method": "vicreg", "most_images": 2.5}, "most_images 2.5 is not an integer"),
        (TypeError, {}, "build needs a method or a row"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_does(error, call, message):
    with pytest.raises(error, match=message):
        build(width=8, **call)


def test_a_width_is_needed():
    with pytest.raises(TypeError, match="give width=C"):
        build("simclr")
