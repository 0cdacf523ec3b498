"""A bank of which every rank has a share gives what the whole bank gives, with exact similarities."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from test_knn import clusters
from torch import nn

from unigrad_fast.evaluation.features import LeftOut
from unigrad_fast.evaluation.knn import KNNResult, sharded_knn
from unigrad_fast.evaluation.passes import new_features
from unigrad_fast.evaluation.shares import Share, norms, rounded, share_of
from unigrad_fast.pipelines import EvaluationLoader, Manifest
from unigrad_fast.runtime.process_group import World

NONE = LeftOut(0, 1, None)


def world() -> World:
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return World(rank, size, rank, size, torch.device("cpu"), "gloo")


@pytest.mark.parametrize("width", [1, 2, 512, 2048])
def test_products_of_rows_and_their_sums_are_exact_in_fp32(width):
    torch.manual_seed(0)
    one_large = torch.zeros(1, width)
    one_large[0, 0] = 1
    features = torch.cat([torch.randn(40, width), torch.ones(1, width), -torch.ones(1, width), one_large])
    rows = rounded(3.7 * features)
    assert rows.dtype == torch.float16 and torch.equal(rows, rows.round())
    whole = rows.long()
    assert (whole**2).sum(1).max() <= 2**24
    expected = whole @ whole.T
    permuted = torch.randperm(width)
    for order in (slice(None), permuted):
        fp32 = rows.float()[:, order]
        assert torch.equal((fp32 @ fp32.T).long(), expected)
    unit = torch.nn.functional.normalize(features.double())
    cosine = expected / norms(rows) / norms(rows)[:, None]
    assert (cosine - unit @ unit.T).abs().max() < 1e-3


def test_rows_of_zeros_stay_zeros():
    assert not rounded(torch.zeros(2, 5)).any()


def data(seed: int, repeated: bool) -> list[torch.Tensor]:
    """Rows and labels of a bank and of queries; repeated ones have many equal similarities of different classes."""
    train, train_labels, val, val_labels = clusters(seed, bank=90, queries=31)
    if repeated:
        train, val = train.sign(), val.sign()
        train[:, 4:] = val[:, 4:] = 0
    return [rounded(train), train_labels, rounded(val), val_labels]


def by_definition(bank, labels, queries, truth, k: int, temperature: float) -> tuple[float, float]:
    """Top-1 and top-5 of the whole bank, in whole numbers, query by query."""
    hits = np.zeros(2)
    product = ((queries.long() @ bank.long().T).float() * (1 / norms(bank)).float()).double() / norms(queries)[:, None]
    for row, true in zip(product.tolist(), truth.tolist(), strict=True):
        nearest = sorted(range(len(bank)), key=lambda i: (-row[i], int(labels[i])))[:k]
        votes: dict[int, float] = {}
        for i in nearest:
            votes[int(labels[i])] = votes.get(int(labels[i]), 0.0) + np.exp(row[i] / temperature)
        ranking = sorted(votes, key=lambda c: (-votes[c], c))
        hits += [true in ranking[:1], true in ranking[:5]]
    return tuple(100 * hits / len(queries))


def shared(seed: int, repeated: bool, k: int, chunk: int) -> KNNResult:
    """The result where this rank has a share of its own size: the last of several has no image of the bank."""
    rank, size = world().rank, world().size
    bank, labels, queries, truth = data(seed, repeated)
    ends = [0, *(len(bank) * (number + 1) // (size * (size + 1) // 2 + 1) for number in range(size - 2)), len(bank)]
    ends += [len(bank)] * (size + 1 - len(ends))
    own = slice(ends[rank], ends[rank + 1])
    mine = slice(0, 0) if size == 3 and rank == 0 else slice(rank - (size == 3), None, size - (size == 3))
    shares = Share(bank[own], labels[own], NONE), Share(queries[mine], truth[mine], NONE)
    return sharded_knn(*shares, world(), k, chunk=chunk)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_any_number_of_ranks_gets_the_whole_banks_result(workers, ranks):
    for seed, repeated, k, chunk in [(1, False, 7, 4096), (2, True, 9, 8), (3, True, 90, 5), (4, False, 1, 13)]:
        expected = by_definition(*data(seed, repeated), k, 0.1)
        results = workers(ranks).run(shared, seed, repeated, k, chunk)
        assert len(set(results)) == 1
        assert (results[0].accuracy, results[0].top5) == pytest.approx(expected)
        assert (results[0].queries, results[0].bank, results[0].k) == (31, 90, k)
        assert results[0].accuracy < 100


def share_in(folder: Path) -> tuple:
    backbone = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten())
    here = world()
    manifest = Manifest.from_folder(folder)
    loader = EvaluationLoader(manifest, 16, batch_size=2, rank=here.rank, world_size=here.size, threads=1)
    share = share_of(new_features(backbone, loader, here, None, 0.0), manifest.labels, here)
    return share.rows.dtype, share.rows.shape, share.labels.tolist()


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_rank_keeps_its_own_images_only_in_half_precision(workers, tmp_path, ranks):
    for number in range(4):
        place = tmp_path / "images" / str(number % 2)
        place.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 20), (60 * number, 9, 30)).save(place / f"{number}.jpg")
    shares = workers(ranks).run(share_in, tmp_path / "images")
    counts = [4] if ranks == 1 else [2, 1, 1]
    assert [shape for _, shape, _ in shares] == [(count, 48) for count in counts]
    assert {dtype for dtype, _, _ in shares} == {torch.float16}
    assert sorted(label for _, _, labels in shares for label in labels) == [0, 0, 1, 1]
