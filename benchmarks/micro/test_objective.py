"""The objective and its parts: two global views of N = 128 embeddings of width C, fp32."""

from __future__ import annotations

import pytest
import torch

IMAGES = 128
BALANCE, DECAY = 100.0, 0.99

pytestmark = [pytest.mark.benchmark(group="objective"), pytest.mark.parametrize("width", [1024, 2048])]


@pytest.fixture
def embedding_NC(width, device):
    """Embeddings of both views, online and target, [4·N, C]: correlated, like those of the same image."""
    generator = torch.Generator().manual_seed(0)
    image_NC = torch.randn(IMAGES, width, generator=generator)
    return (image_NC.repeat(4, 1) + torch.randn(4 * IMAGES, width, generator=generator)).to(device)


@pytest.fixture
def unit_MC(embedding_NC):
    return torch.nn.functional.normalize(embedding_NC)


@pytest.fixture
def correlation_CC(unit_MC):
    target_MC = unit_MC[2 * IMAGES :]
    return target_MC.T @ target_MC / len(target_MC)


def test_unit_embeddings(measure, public, embedding_NC):
    unit_embeddings = public("unigrad_fast.kernels:unit_embeddings")
    views = list(embedding_NC.split(IMAGES))
    measure(lambda: unit_embeddings(views))


def test_correlation_update(measure, public, unit_MC, correlation_CC):
    update_correlation_ = public("unigrad_fast.kernels:update_correlation_")
    target_MC = unit_MC[2 * IMAGES :]
    measure(lambda: update_correlation_(correlation_CC, target_MC, decay=DECAY, count=2.0 * IMAGES))


def test_correlation_product(measure, public, unit_MC, correlation_CC):
    correlation_product = public("unigrad_fast.kernels:correlation_product")
    online_MC = unit_MC[: 2 * IMAGES]
    measure(lambda: correlation_product(online_MC, correlation_CC))


def test_gradient(measure, public, embedding_NC, unit_MC, correlation_CC):
    unigrad_gradient = public("unigrad_fast.kernels:unigrad_gradient")
    rows = 2 * IMAGES
    inverse_norm_M = 1 / torch.linalg.vector_norm(embedding_NC[:rows], dim=1)
    positive_MC = unit_MC[rows:].roll(IMAGES, 0)  # the other view's target
    arguments = (unit_MC[:rows], inverse_norm_M, positive_MC, correlation_CC)
    measure(lambda: unigrad_gradient(*arguments, balance=BALANCE, scale=1 / rows))


def test_forward_and_backward(measure, public, embedding_NC, width, device):
    objective = public("unigrad_fast.objectives:UniGrad")(width=width, balance=BALANCE, decay=DECAY).to(device)
    first, second, *target = embedding_NC.split(IMAGES)
    online = [first.requires_grad_(), second.requires_grad_()]

    def step() -> None:
        for z in online:
            z.grad = None
        objective(online=online, target=target).loss.backward()

    measure(step)


@pytest.mark.parametrize("measures", [False, True], ids=["plain", "figures"])
def test_reported_step(measure, public, embedding_NC, width, device, measures):
    """What a reported step computes of the objective, with the metrics of the paper's figures or without."""
    objective = public("unigrad_fast.objectives:UniGrad")(width=width, balance=BALANCE, decay=DECAY).to(device)
    first, second, *target = embedding_NC.split(IMAGES)
    online = [first.requires_grad_(), second.requires_grad_()]
    objective.measures = measures

    def step() -> None:
        for z in online:
            z.grad = None
        output = objective(online=online, target=target)
        output.loss.backward()
        output.figures() if measures else output.feature_std()

    measure(step)
