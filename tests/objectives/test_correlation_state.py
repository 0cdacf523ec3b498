"""F as state: whoever reads it gets all of it, whoever writes to it is heard, and nothing rounds or sends it.

On a GPU only the upper triangle of F is kept up beside a working copy; here the tests spoil the lower one themselves.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
from test_unigrad import leaves, views
from torch import Tensor, nn

from unigrad_fast.objectives import UniGrad

WIDTH = 20


def batch(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, list[Tensor]]:
    online, target = (views(width=WIDTH, seed=each, dtype=dtype) for each in (seed, seed + 50))
    return {"online": online, "target": target}


def trained(compute_dtype: torch.dtype | None = torch.bfloat16, steps: int = 2) -> nn.Module:
    """A model with an objective that has taken some batches; with `compute_dtype` F has a working copy."""
    model = nn.Module()
    model.objective = UniGrad(WIDTH, compute_dtype=compute_dtype)
    for seed in range(steps):
        model.objective(**batch(seed))
    return model


def spoil(model: nn.Module) -> nn.Module:
    """What the kernels may leave below the diagonal; no version tells of it."""
    lower = torch.ones(WIDTH, WIDTH, dtype=torch.bool).tril(-1)
    model.objective.average.correlation.data[lower] = 77.0
    return model


def pickled(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


def loaded(model: nn.Module) -> nn.Module:
    other = trained(steps=1)
    other.load_state_dict(model.state_dict())
    return other


ROADS: dict[str, Callable[[nn.Module], Tensor]] = {
    "the attribute": lambda model: model.objective.correlation,
    "the parent's state dict": lambda model: model.state_dict()["objective.average.correlation"],
    "a state dict that is loaded": lambda model: loaded(model).objective.average.correlation,
    "a copy": lambda model: copy.deepcopy(model).objective.average.correlation,
    "a pickle": lambda model: pickled(model).objective.average.correlation,
    "a move": lambda model: model._apply(torch.clone).objective.average.correlation,
    "a move that is none": lambda model: model.to("cpu").objective.average.correlation,
    "float64 embeddings": lambda model: (model.objective.eval()(**batch(5, torch.float64)), model)[
        1
    ].objective.average.correlation.float(),
    "another dtype of the product": lambda model: _in_full_precision(model).objective.average.correlation,
}


def _in_full_precision(model: nn.Module) -> nn.Module:
    model.objective.compute_dtype = None
    model.objective.eval()(**batch(5))
    return model


@pytest.mark.parametrize("road", ROADS)
def test_whoever_reads_the_correlation_gets_all_of_it_again_and_again(road):
    model, expected = spoil(trained()), trained().objective.correlation
    assert torch.equal(ROADS[road](model), expected)
    if model.objective.average._working is not None:
        assert torch.equal(ROADS[road](spoil(model)), expected)


@pytest.mark.parametrize("road", ["the attribute", "the parent's state dict"])
@pytest.mark.parametrize("later", [False, True])
def test_who_writes_to_the_correlation_he_was_given_is_heard_at_once_and_later(road, later):
    model = trained()
    given = ROADS[road](model)
    if later:
        model.objective.eval()(**batch(3))  # makes the copy anew
    given.copy_(torch.eye(WIDTH))
    output = model.objective.eval()(**batch(4))
    assert output.metrics["negative_term"].item() == pytest.approx(1, rel=1e-2)


def test_reading_the_correlation_changes_no_later_step():
    read, unread = trained(), trained()
    for seed in range(2, 4):
        for model in (read, unread):
            output = model.objective(**batch(seed))
            if model is read:
                before = output.loss.item()
                assert torch.equal(model.objective.correlation, spoil(model).objective.correlation)
        assert before == output.loss.item()
    assert torch.equal(read.objective.correlation, unread.objective.correlation)


def test_the_correlation_is_no_buffer_and_stays_in_the_state_dict_under_its_names():
    model = trained()
    assert not [*model.buffers()] and not [*model.parameters()]
    state = model.state_dict()
    assert list(state) == ["objective.average.correlation", "objective.average.updates"]
    assert state["objective.average.updates"] == 2 and not state["objective.average.correlation"].requires_grad


CONVERSIONS = [nn.Module.half, nn.Module.bfloat16, nn.Module.double, lambda model: model.type(torch.half)]


@pytest.mark.parametrize("convert", CONVERSIONS)
def test_converting_the_module_leaves_the_correlation_and_the_next_step_as_they_are(convert):
    plain, converted = trained(None), convert(trained(None))
    assert converted.objective.correlation.dtype == torch.float32
    losses = [model.objective(**batch(9)).loss for model in (plain, converted)]
    assert losses[0] == losses[1] and torch.equal(plain.objective.correlation, converted.objective.correlation)
    assert converted.objective.updates == 3 and converted.objective.updates.dtype == torch.int64


def test_a_default_dtype_of_float64_leaves_the_correlation_in_fp32():
    expected = trained(None).objective
    expected(**batch(9))
    torch.set_default_dtype(torch.float64)
    try:
        objective = trained(None).objective
        assert objective.correlation.dtype == torch.float32
        assert objective(**batch(9)).loss.dtype == torch.float32
        three = {**batch(9), "online": views(3, width=WIDTH, dtype=torch.float32)}
        assert objective.eval()(**three).loss.dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(objective.correlation, expected.correlation)


def test_float64_comes_back_from_a_state_dict_bit_for_bit():
    objective, other = UniGrad(WIDTH), UniGrad(WIDTH)
    objective(**batch(dtype=torch.float64))
    other.load_state_dict(objective.state_dict())
    for each in (objective, other):
        each(**batch(1, torch.float64))
    assert torch.equal(objective.correlation, other.correlation)


def test_a_module_made_on_the_meta_device_begins_empty_or_with_what_it_is_given():
    state = trained().state_dict()
    with torch.device("meta"):
        models = [trained(steps=0) for _ in range(4)]
    with pytest.raises(RuntimeError, match=r"no values; .*to_empty\(device=.*load_state_dict\(..., assign=True\)"):
        models[0].objective(**batch())
    emptied = models[1].to_empty(device="cpu")
    assert not emptied.objective.correlation.any() and emptied.objective.updates == 0
    assert emptied.objective(**batch()).loss.item() == trained(steps=0).objective(**batch()).loss.item()
    models[2].load_state_dict(copy.deepcopy(state), assign=True)
    models[3].load_state_dict(state)
    for model in models[2:]:
        assert torch.equal(model.objective.correlation, state["objective.average.correlation"])
        assert model.objective.updates == 2 and model.objective.correlation.device.type == "cpu"
        model.objective(**batch(7))


def test_a_state_dict_that_does_not_fit_is_refused_by_name_and_changes_nothing():
    model, state = trained(), trained().state_dict()
    before = model.objective.correlation.clone()
    name = "objective.average.correlation"
    for wrong, message in (
        ({**state, name: torch.zeros(8, 8)}, rf"{name} is \[8, 8\] in the state dict and \[20, 20\] here"),
        ({key: value for key, value in state.items() if key != name}, "Missing key"),
        ({**state, "objective.average.other": torch.zeros(1)}, "Unexpected key"),
    ):
        with pytest.raises(RuntimeError, match=message):
            model.load_state_dict(wrong)
        assert torch.equal(model.objective.correlation, before)
    assert model.load_state_dict({}, strict=False).missing_keys == list(state)


def test_an_objective_made_and_moved_in_inference_mode_trains():
    with torch.inference_mode():
        objective = UniGrad(WIDTH)._apply(torch.clone)
    objective(online=leaves(batch()["online"]), target=batch()["target"]).loss.backward()
    assert objective.updates == 1
