"""Host time of a step of the objective: two images of eight channels, with almost nothing to compute.

At C = 2048 a GPU needs less time than that and waits for the host. For comparison, the formula in plain torch, operator
by operator.
"""

from __future__ import annotations

import pytest
import torch

IMAGES, WIDTH = 2, 8
BALANCE, DECAY = 100.0, 0.99

pytestmark = pytest.mark.benchmark(group="objective, host")


@pytest.fixture
def views(device):
    """Embeddings of two views, online and target, [N, C] each."""
    generator = torch.Generator().manual_seed(0)
    first, second, *target = torch.randn(4, IMAGES, WIDTH, generator=generator).to(device)
    return [first.requires_grad_(), second.requires_grad_()], target


def test_step(benchmark, public, views, device):
    objective = public("unigrad_fast.objectives:UniGrad")(width=WIDTH, balance=BALANCE, decay=DECAY).to(device)
    online, target = views

    def step() -> None:
        for z in online:
            z.grad = None
        objective(online=online, target=target).loss.backward()

    benchmark(step)


def test_step_of_plain_torch(benchmark, views, device):
    online, target = views
    correlation_CC = torch.zeros(WIDTH, WIDTH, device=device)

    def step() -> None:
        for z in online:
            z.grad = None
        with torch.no_grad():
            z_MC, target_MC = torch.cat([z.detach() for z in online]), torch.nn.functional.normalize(torch.cat(target))
            norm_M1 = torch.linalg.vector_norm(z_MC, dim=-1, keepdim=True).clamp_min(1e-12)
            unit_MC = z_MC / norm_M1
            correlation_CC.addmm_(target_MC.T, target_MC, beta=DECAY, alpha=(1 - DECAY) / len(target_MC))
            gradient_MC = (unit_MC @ correlation_CC).mul_(BALANCE).sub_(target_MC.roll(IMAGES, 0))
            along_M1 = torch.linalg.vecdot(unit_MC, gradient_MC).unsqueeze(-1)
            gradient_MC.addcmul_(unit_MC, along_M1, value=-1.0).div_(norm_M1.mul_(len(unit_MC)))
        torch.autograd.backward(online, gradient_MC.chunk(2))

    benchmark(step)
