"""Gradients that are averaged over ranks in buckets while backward runs."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from unigrad_fast.training.reduction import BucketedReduction, is_dense

BUCKETS = (1, 3000, 10**9)  # bytes: each parameter alone, a few together, all in one


class Branches(nn.Module):
    """Two branches that are computed in an order of one's choice, a layer that is not used, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(3, 8, 3, padding=1)
        self.unused, self.frozen = nn.Linear(3, 5), nn.Linear(2, 2).requires_grad_(False)
        self.last = nn.Linear(8, 4)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor, reverse: bool) -> Tensor:
        branches = [self.right, self.left] if reverse else [self.left, self.right]
        return self.last(sum(branch(x) for branch in branches).mean((2, 3)))


def gradients(rank: int, bucket_bytes: int | None, accumulation: int) -> list[Tensor | None]:
    """Of two steps, with buckets or by reducing every gradient after backward."""
    torch.manual_seed(0)
    net = Branches()
    reduction = None if bucket_bytes is None else BucketedReduction(net.parameters(), bucket_bytes)
    found: list[Tensor | None] = []
    for step in range(2):
        for part in range(accumulation):
            x = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(100 * step + 10 * part + rank))
            if reduction is not None and part == accumulation - 1:
                reduction.open()
            # Backward's order differs from rank to rank; collectives must not.
            net(x, reverse=rank % 2 == 1).square().sum().backward()
        if reduction is not None:
            reduction.finish()
        else:
            for parameter in net.parameters():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad)
                    parameter.grad.mul_(1 / dist.get_world_size())
        for parameter in net.parameters():
            if parameter.grad is not None:
                assert parameter.grad.stride() == parameter.stride() or reduction is None
                assert parameter.grad.data_ptr() % 16 == 0
        found += [None if p.grad is None else p.grad.clone() for p in net.parameters()]
        net.zero_grad(set_to_none=True)
    return found


def on_each_rank(accumulation: int) -> list[list[Tensor | None]]:
    return [gradients(dist.get_rank(), bucket_bytes, accumulation) for bucket_bytes in (None, *BUCKETS)]


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("ranks", [2, 3])
def test_gradients_are_those_of_a_reduction_after_backward(workers, ranks, accumulation):
    results = workers(ranks).run(on_each_rank, accumulation)
    for expected, *bucketed in results:
        for found, wanted in itertools.chain.from_iterable(zip(each, expected, strict=True) for each in bucketed):
            if wanted is None:
                assert found is None
            elif ranks == 2:
                assert torch.equal(found, wanted)
            else:
                torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)
    for first, second in zip(results[0], results[1], strict=True):  # all ranks have the same
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(first, second, strict=True))


def order_of_collectives() -> list[int]:
    """Elements of each collective, as this rank begins them."""
    net, sizes = Branches(), []
    original = dist.all_reduce

    def noted(tensor: Tensor, **settings):
        sizes.append(tensor.numel())
        return original(tensor, **settings)

    dist.all_reduce = noted
    try:
        reduction = BucketedReduction(net.parameters(), 1)
        reduction.open()
        net(torch.ones(1, 3, 4, 4), reverse=dist.get_rank() == 1).sum().backward()
        before = len(sizes)
        reduction.finish()
    finally:
        dist.all_reduce = original
    return [before, *sizes]


def test_ranks_begin_collectives_in_one_order_and_before_backward_ends(workers):
    first, second = workers(2).run(order_of_collectives)
    assert first == second and len(first) == 1 + 8
    assert first[0] == 2  # the last layer's; the layer that is not used holds up the rest until the end


@pytest.mark.parametrize(
    ("tensor", "dense"),
    [
        (torch.empty(4, 3, 2, 2).contiguous(memory_format=torch.channels_last), True),
        (torch.empty(4, 1, 2, 2), True),
        (torch.empty(()), True),
        (torch.empty(4, 6)[:, ::2], False),
        (torch.empty(1).expand(3), False),
    ],
)
def test_only_tensors_without_gaps_are_dense(tensor, dense):
    assert is_dense(tensor) is dense


def of_largest(divide_first: bool) -> list[float]:
    """The mean of a gradient that no fp32 sum over ranks can hold."""
    weight = nn.Parameter(torch.ones(2))
    reduction = BucketedReduction([weight], divide_first=divide_first)
    reduction.open()
    (weight * 3e38).sum().backward()
    reduction.finish()
    return weight.grad.tolist()


def test_gradients_divided_first_do_not_overflow_in_the_sum_over_ranks(workers):
    largest = torch.tensor(3e38).item()
    assert workers(2).run(of_largest, True) == [[largest] * 2] * 2
    assert workers(2).run(of_largest, False) == [[float("inf")] * 2] * 2
