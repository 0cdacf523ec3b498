"""State that is no buffer: moved, copied, loaded."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from test_forms import WIDTH
from test_unigrad import views
from torch.optim.swa_utils import AveragedModel

from unigrad_fast.objectives import GradientForm, build


def with_state() -> GradientForm:
    objective = build(row="a", width=WIDTH, bank_size=20)
    objective(online=views(dtype=torch.float32), target=views(seed=1, dtype=torch.float32))
    return objective


def test_conversions_and_averages_leave_state_as_it_is():
    objective = with_state()
    keys = objective.bank.keys.clone()
    for converted in (objective.half(), objective.double(), objective.to("cpu")):
        assert torch.equal(converted.bank.keys, keys) and converted.bank.keys.dtype == torch.float32
    averaged = AveragedModel(objective, use_buffers=True)
    averaged.update_parameters(objective)
    assert torch.equal(averaged.module.bank.keys, keys)


def test_copies_and_pickles_have_state_of_their_own():
    objective = with_state()
    for other in (copy.deepcopy(objective), pickle.loads(pickle.dumps(objective))):
        assert torch.equal(other.bank.keys, objective.bank.keys)
        other(online=views(dtype=torch.float32), target=views(seed=2, dtype=torch.float32))
        assert other.bank.taken == 24 and objective.bank.taken == 12


def test_a_state_dict_goes_to_the_meta_device_and_back():
    objective = with_state()
    with torch.device("meta"):
        other = build(row="a", width=WIDTH, bank_size=20)
    other.load_state_dict(objective.state_dict(), assign=True)
    assert torch.equal(other.bank.keys, objective.bank.keys)
    with torch.device("meta"):
        other = build(row="a", width=WIDTH, bank_size=20)
    assert not other.to_empty(device="cpu").bank.keys.any()


def test_a_state_dict_that_does_not_fit_is_refused_with_its_shapes():
    state = with_state().state_dict()
    with pytest.raises(RuntimeError, match=r"bank.keys is \[20, 16\] in the state dict and \[30, 16\] here"):
        build(row="a", width=WIDTH, bank_size=30).load_state_dict(state)
    del state["bank.taken"]
    with pytest.raises(RuntimeError, match=r"bank\.taken"):
        build(row="a", width=WIDTH, bank_size=20).load_state_dict(state)


def test_float64_embeddings_make_state_float64():
    objective = with_state()
    objective(online=views(), target=views(seed=2))
    assert objective.bank.keys.dtype == torch.float64
    other = build(row="a", width=WIDTH, bank_size=20)
    other.load_state_dict(objective.state_dict())
    assert other.bank.keys.dtype == torch.float64 and torch.equal(other.bank.keys, objective.bank.keys)
