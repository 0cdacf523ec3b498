"""LARS against its formula, tensor by tensor."""

import copy

import pytest
import torch

from unigrad_fast.training.optimizers import LARS


def formula(weights, gradients, velocities, lr, momentum, weight_decay, trust_coefficient, adapt):
    """One step in float64, one tensor at a time."""
    for w, gradient, v in zip(weights, gradients, velocities, strict=True):
        update = gradient + weight_decay * w
        ratio = 1.0
        if adapt and w.norm() > 0 and update.norm() > 0:
            ratio = trust_coefficient * w.norm() / update.norm()
        v.copy_(momentum * v + ratio * update)
        w.sub_(lr * v)


@pytest.mark.parametrize("adapt", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_five_steps_are_those_of_the_formula(dtype, weight_decay, adapt):
    torch.manual_seed(0)
    weights = [torch.randn(5, 3), torch.zeros(4), torch.randn(7), torch.randn(2, 2, 3, 3)]
    ours = [w.to(dtype).clone().requires_grad_() for w in weights]
    expected, velocities = [w.double() for w in weights], [torch.zeros_like(w, dtype=torch.float64) for w in weights]
    settings = {"lr": 0.3, "momentum": 0.8, "weight_decay": weight_decay, "trust_coefficient": 0.02}
    optimizer = LARS([{"params": ours, "adapt": adapt}], **settings)
    for step in range(5):
        gradients = [torch.randn_like(w) if step or w.ndim < 2 else torch.zeros_like(w) for w in weights]
        for w, gradient in zip(ours, gradients, strict=True):
            w.grad = gradient.to(dtype)
        optimizer.step()
        formula(expected, [g.double() for g in gradients], velocities, adapt=adapt, **settings)
    # Five steps round weights and what they are made of some four times each, an eps for two; weights may cancel.
    tolerance = 10 * torch.finfo(dtype).eps * max(e.abs().max() for e in expected)
    for w, e in zip(ours, expected, strict=True):
        assert (w.double() - e).abs().max() <= tolerance


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_gradients_stay_as_they_are(weight_decay):
    weights = [torch.randn(4, 3, requires_grad=True), torch.randn(5, requires_grad=True)]
    gradients = [torch.randn_like(w) for w in weights]
    for w, gradient in zip(weights, gradients, strict=True):
        w.grad = gradient.clone()
    LARS(weights, lr=0.1, weight_decay=weight_decay).step()
    assert all(torch.equal(w.grad, gradient) for w, gradient in zip(weights, gradients, strict=True))


def test_a_closure_is_called_with_gradients_and_its_loss_returned():
    weight = torch.ones(3, requires_grad=True)

    def closure() -> torch.Tensor:
        loss = weight.square().sum()
        loss.backward()
        return loss

    assert LARS([weight], lr=0.5, trust_coefficient=1.0).step(closure) == 3
    assert torch.allclose(weight, torch.full((3,), 0.5))


def test_its_state_is_saved_and_loaded():
    weight = torch.ones(3, requires_grad=True)
    optimizer = LARS([weight], lr=0.1)
    weight.grad = torch.tensor([1.0, 2.0, 3.0])
    optimizer.step()
    other = copy.deepcopy(weight.detach()).requires_grad_()
    again = LARS([other], lr=0.5)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for w, o in ((weight, optimizer), (other, again)):
        w.grad = torch.tensor([3.0, 1.0, 0.0])
        o.step()
    assert torch.equal(weight, other)
