"""Parameters with owners at ZeRO stages 0 to 2: who keeps what, and that ranks stay alike."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from unigrad_fast.optimization.lars import LARS
from unigrad_fast.optimization.owners import Owners, divided
from unigrad_fast.optimization.sgd import SGD

OPTIMIZERS = {"sgd": lambda weights: SGD(weights, lr=0.1), "lars": lambda weights: LARS(weights, lr=0.1)}


@given(sizes=st.lists(st.integers(1, 1000), min_size=1, max_size=30), ranks=st.integers(1, 9))
def test_no_rank_has_more_than_the_mean_and_the_largest_tensor(sizes, ranks):
    chosen = divided(sizes, ranks)
    loads = [sum(size for size, rank in zip(sizes, chosen, strict=True) if rank == each) for each in range(ranks)]
    assert sum(loads) == sum(sizes)
    assert max(loads) < sum(sizes) / ranks + max(sizes)


def stepped(name: str, stage: int, spoilt: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Weights before and after two steps of two micro-batches; one gradient of rank 1 may be infinite."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 5)).to(memory_format=torch.channels_last)
    weights = list(network.parameters())
    owners, optimizer = Owners(weights, stage), OPTIMIZERS[name](weights)
    before = [weight.detach().clone() for weight in weights]
    if spoilt and dist.get_rank() == 1:
        weights[-1].register_hook(lambda gradient: gradient * torch.inf)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(2):
        for _ in range(2):
            images = torch.randn(6, 3, 4, 4, generator=generator)
            network(images).square().mean().backward()
        owners.step(optimizer)
    return before, [weight.detach() for weight in weights]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("ranks", [2, 5])  # there are four tensors: the last rank owns none
def test_all_ranks_end_with_the_weights_of_stage_0(workers, name, ranks):
    (before, expected), *_ = workers(ranks).run(stepped, name, 0, False)
    assert not any(torch.equal(old, new) for old, new in zip(before, expected, strict=True))
    for stage in (1, 2):
        one, *others = [after for _, after in workers(ranks).run(stepped, name, stage, False)]
        for weight, alike in zip(one, expected, strict=True):
            # The sum of 2·ranks gradients in another order: an error of at most so many units of the largest of them,
            # which are of order 1, as the weights are; two steps at rate 0.1 with momentum take 0.3 of it.
            torch.testing.assert_close(weight, alike, rtol=0, atol=2 * ranks * torch.finfo(torch.float32).eps)
        assert all(torch.equal(*pair) for other in others for pair in zip(one, other, strict=True))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_gradient_that_is_not_finite_on_one_rank_drops_the_step_of_every_owner(workers, name, stage):
    for before, after in workers(2).run(stepped, name, stage, True):
        assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
