"""The loss scale of fp16: when it changes, and that the optimizers' steps do not depend on it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from unigrad_fast.optimization.loss_scale import FIRST, LEAST, MOST, PATIENCE, LossScale
from unigrad_fast.training.optimizers import LARS, SGD, AdamW

OFF, ON = torch.tensor(0.0), torch.tensor(1.0)


def after(forward: Tensor, gradients: Tensor, value: float = FIRST, good_steps: int = 5) -> tuple[float, int, bool]:
    """The scale, the steps since it changed, and whether it answers, after a step with these flags."""
    scale = LossScale(torch.device("cpu"))
    scale.value.fill_(value)
    scale.good_steps.fill_(good_steps)
    scale.note(forward, gradients)
    answered = scale.update(torch.maximum(forward, gradients))
    return scale.value.item(), scale.good_steps.item(), answered.item()


def test_an_overflow_of_gradients_alone_halves_it():
    assert after(OFF, ON) == (FIRST / 2, 0, True)


def test_at_the_floor_an_overflow_has_no_answer():
    assert after(OFF, ON, value=LEAST) == (LEAST, 0, False)


@pytest.mark.parametrize("gradients", [OFF, ON])
def test_what_a_forward_pass_met_is_not_answered_by_it(gradients):
    assert after(ON, gradients) == (FIRST, 5, False)


def test_it_doubles_after_enough_good_steps_up_to_its_most():
    assert after(OFF, OFF) == (FIRST, 6, False)
    assert after(OFF, OFF, good_steps=PATIENCE - 1) == (2 * FIRST, 0, False)
    assert after(OFF, OFF, value=MOST, good_steps=PATIENCE - 1) == (MOST, 0, False)


OPTIMIZERS = {
    "sgd": lambda groups, clip: SGD(groups, lr=0.1, weight_decay=0.01, clip_norm=clip),
    "adamw": lambda groups, clip: AdamW(groups, lr=0.1, clip_norm=clip),
    "lars": lambda groups, clip: LARS(groups, lr=0.1, weight_decay=0.01, clip_norm=clip),
}


def stepped(name: str, clip_norm: float, scaled_by: float | None) -> tuple[list[Tensor], float]:
    """The weights after two steps, and the last gradient's norm."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
    optimizer = OPTIMIZERS[name](list(network.parameters()), clip_norm)
    if scaled_by is not None:
        optimizer.loss_scale = LossScale(torch.device("cpu"))
        optimizer.loss_scale.value.fill_(scaled_by)
    for _ in range(2):
        for parameter in network.parameters():
            parameter.grad = torch.randn_like(parameter) * (scaled_by or 1.0)
        optimizer.open()
        optimizer.step()
    return [p.detach() for p in network.parameters()], optimizer.gradient_norm.item()


@pytest.mark.parametrize("clip_norm", [0.0, 0.5])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_bit_for_bit_those_without_a_scale(name, clip_norm):
    """A power of two changes no mantissa; norms, clipping and LARS's ratios are of the gradients without it."""
    (expected, norm), (ours, ours_norm) = (stepped(name, clip_norm, by) for by in (None, 2.0**16))
    assert all(map(torch.equal, ours, expected))
    assert ours_norm == norm


def test_gradients_that_overflow_leave_the_weights_and_ask_for_a_lower_scale():
    weight = torch.ones(3, requires_grad=True)
    optimizer = SGD([weight], lr=0.1)
    optimizer.loss_scale = scale = LossScale(torch.device("cpu"))
    weight.grad = torch.tensor([1.0, torch.inf, 1.0])
    optimizer.open()
    optimizer.step()
    assert torch.equal(weight, torch.ones(3))
    assert scale.update(optimizer.nonfinite) and scale.value == FIRST / 2
