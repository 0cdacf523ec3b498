"""Sums weighted by similarity, without an array of all rows by all samples."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from unigrad_fast.objectives import ROWS, build, weighted_sums
from unigrad_fast.objectives.forms import GRADIENTS
from unigrad_fast.objectives.weighted_sums import products_first, similarity_sum, softmax_of_samples, softmax_sum


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr(weighted_sums, "CHUNK", 60)
    monkeypatch.setattr(weighted_sums, "LEAST", 4)


@pytest.mark.parametrize("chunk", [60, 1000])
@pytest.mark.parametrize("scale", [1.0, 40.0])
@pytest.mark.parametrize(
    ("own", "positive", "gaps"),
    [((), False, False), (((slice(None), 3),), True, True), (((slice(4), 11), (slice(4, 7), 2)), False, True)],
)
def test_a_softmax_in_chunks_or_at_once_is_the_softmax(chunk, scale, own, positive, gaps, monkeypatch):
    monkeypatch.setattr(weighted_sums, "CHUNK", chunk)
    query, key, first = random(7, 5) * scale, random(23, 5, seed=1), random(7, 5, seed=2) if positive else None
    bias = torch.where(torch.arange(23) % 5 == 2, -torch.inf, 0.0).double() if gaps else torch.zeros(23).double()
    logit = query @ key.T / 0.3 + bias
    for rows, first_of in own:
        logit[rows].diagonal(first_of).fill_(-torch.inf)
    samples = key.expand(7, 23, 5)
    if positive:
        logit = torch.cat([(query * first).sum(-1, keepdim=True) / 0.3, logit], dim=-1)
        samples = torch.cat([first[:, None], samples], dim=1)
    found, log = softmax_sum(query, key, 0.3, bias_K=bias if gaps else None, positive_NC=first, own=own)
    torch.testing.assert_close(found, (logit.softmax(-1)[..., None] * samples).sum(1), rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(log, logit.logsumexp(-1), rtol=1e-12, atol=1e-12)


def test_the_softmax_of_the_samples_is_theirs():
    query, key, log = random(7, 5), random(23, 5, seed=1), random(23, seed=2)
    weight = (query @ key.T / 0.3 - log).exp()
    weight.diagonal(4).fill_(0)
    torch.testing.assert_close(softmax_of_samples(query, key, 0.3, log, own=[(slice(None), 4)]), weight @ key)


@pytest.mark.parametrize("samples", [2, 60])
def test_both_orders_of_products_are_the_same(samples):
    query, key, value = random(7, 5), random(samples, 5, seed=1), random(samples, 5, seed=2)
    torch.testing.assert_close(similarity_sum(query, key, value), query @ key.T @ value)
    assert products_first(7, samples, 5) == (samples == 60)


@pytest.mark.parametrize("samples", [0, 2, 9])
def test_without_samples_there_is_nothing(samples):
    nothing = torch.full((samples,), -torch.inf).double()
    found, log = softmax_sum(random(3, 5), random(samples, 5), 0.3, bias_K=nothing)
    assert not found.any() and not log.any()


class Largest(TorchDispatchMode):
    """The most elements that a tensor has which an operator makes."""

    elements = 0

    def __torch_dispatch__(self, operator, types, arguments=(), keywords=None):
        made = operator(*arguments, **(keywords or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and tensor.dim() and all(tensor.stride()):
                self.elements = max(self.elements, tensor.numel())
        return made


EVERY = [{"row": row} for row in ROWS] + [
    {"method": method} for method in GRADIENTS if method not in (*ROWS, "unigrad")
]


@pytest.mark.parametrize("which", EVERY, ids=lambda which: next(iter(which.values())))
def test_a_step_makes_no_array_of_all_rows_by_all_samples(which):
    images, width = 96, 8
    more = {"bank_size": 2 * images} if {"a", "moco"} & {*which.values()} else {}
    objective = build(**which, width=width, **more)
    online = [z.requires_grad_() for z in (random(images, width), random(images, width, seed=1))]
    target = [random(images, width, seed=2), random(images, width, seed=3)]
    with Largest() as largest:
        objective(online=online, target=target).loss.backward()
    assert largest.elements <= 4 * images * width < math.prod((images, images))


def test_every_row_is_there():
    assert "".join(ROWS) == "abdefghij"
