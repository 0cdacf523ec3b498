"""Evaluation on frozen features."""

from __future__ import annotations

import pytest
import torch

BANK, QUERIES, WIDTH, CLASSES = 10_000, 1_000, 512, 100


@pytest.mark.benchmark(group="evaluation")
def test_nearest_neighbours(measure, public, device):
    """1,000 queries against a bank of 10,000 features of width 512."""
    weighted_knn = public("unigrad_fast.evaluation.knn:weighted_knn")
    generator = torch.Generator().manual_seed(0)
    centre = torch.randn(CLASSES, WIDTH, generator=generator)
    label = torch.randint(CLASSES, (BANK + QUERIES,), generator=generator)
    feature = (centre[label] + 2 * torch.randn(len(label), WIDTH, generator=generator)).to(device)
    measure(lambda: weighted_knn(feature[:BANK], label[:BANK], feature[BANK:], label[BANK:]))
