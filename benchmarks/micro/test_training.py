"""Parts of a training step besides the networks: optimizer, target update, batch-norm statistics over ranks."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchvision.models import resnet18

pytestmark = pytest.mark.benchmark(group="training")


@pytest.fixture
def network(device):
    """11.7 million parameters in 62 tensors, with gradients."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = resnet18().to(device)
        for parameter in network.parameters():
            parameter.grad = torch.randn_like(parameter)
    return network


def test_lars_step(measure, public, network):
    LARS = public("unigrad_fast.training.optimizers:LARS")
    optimizer = LARS(network.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-6)
    measure(optimizer.step)


def test_target_update(measure, public, network, device):
    update_target_ = public("unigrad_fast.training.target:update_target_")
    target, skip = copy.deepcopy(network), torch.zeros((), device=device)
    measure(lambda: update_target_(target, network, 0.996, skip))


@pytest.fixture
def rank(tmp_path):
    """The only rank of a process group."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("shape", [(128, 2048), (32, 64, 56, 56)], ids=["projector", "feature-map"])
def test_batch_norm(benchmark, public, rank, monkeypatch, shape):
    """Forward and backward on the CPU, with statistics exchanged by collectives."""
    name = "unigrad_fast.networks.batch_norm"
    norm = nn.BatchNorm2d(shape[1]) if len(shape) == 4 else nn.BatchNorm1d(shape[1])
    public(f"{name}:convert")(norm)
    public(f"{name}:is_alone")
    monkeypatch.setattr(f"{name}.is_alone", lambda: False)  # a single rank would use torch's batch norm
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), requires_grad=True)
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(1))

    def step() -> None:
        x.grad = None
        norm(x).backward(gradient)

    benchmark(step)
