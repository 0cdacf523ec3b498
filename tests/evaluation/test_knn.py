"""Weighted kNN against a reference that follows the definition, and the laws that it obeys."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.neighbors import KNeighborsClassifier

from unigrad_fast.evaluation import KNNResult, weighted_knn


def clusters(seed: int, bank: int = 90, queries: int = 40, classes: int = 6, dim: int = 8) -> list[torch.Tensor]:
    """Overlapping clusters: (train features, train labels, val features, val labels), float64."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(classes, dim))
    labels = [np.concatenate([np.arange(classes), rng.integers(0, classes, n - classes)]) for n in (bank, queries)]
    features = [centres[label] + 1.2 * rng.normal(size=(len(label), dim)) for label in labels]
    return [torch.from_numpy(a) for a in (features[0], labels[0], features[1], labels[1])]


def reference(train, train_labels, val, val_labels, k: int, temperature: float) -> tuple[float, float]:
    """Top-1 and top-5 in percent, image by image, as the definition says; ties as the docstring says."""
    train, val = (a.numpy() / np.linalg.norm(a.numpy(), axis=1, keepdims=True) for a in (train, val))
    hits = np.zeros(2)
    for query, truth in zip(val, val_labels.tolist(), strict=True):
        similarity = train @ query
        nearest = sorted(range(len(train)), key=lambda i: (-similarity[i], int(train_labels[i])))[:k]
        votes: dict[int, float] = {}
        for i in nearest:
            votes[int(train_labels[i])] = votes.get(int(train_labels[i]), 0.0) + np.exp(similarity[i] / temperature)
        ranking = sorted(votes, key=lambda c: (-votes[c], c))
        hits += [truth in ranking[:1], truth in ranking[:5]]
    return tuple(100 * hits / len(val))


@pytest.mark.parametrize("k", [1, 5, 20])
@pytest.mark.parametrize("temperature", [0.02, 0.1, 1.0])
def test_agrees_with_the_definition(k, temperature):
    data = clusters(seed=k)
    result = weighted_knn(*data, k=k, temperature=temperature, chunk=16)
    assert (result.accuracy, result.top5) == pytest.approx(reference(*data, k, temperature))
    assert result.accuracy < 100  # the clusters overlap, so the comparison says something


def test_agrees_with_scikit_learn():
    train, train_labels, val, val_labels = clusters(seed=7)
    unit_train, unit_val = (torch.nn.functional.normalize(a).numpy() for a in (train, val))
    # For unit vectors s = 1 - d²/2; the constant factor exp(1/T) does not change a vote.
    model = KNeighborsClassifier(n_neighbors=10, weights=lambda d: np.exp(-(d**2) / 2 / 0.1), algorithm="brute")
    accuracy = 100 * model.fit(unit_train, train_labels.numpy()).score(unit_val, val_labels.numpy())
    assert weighted_knn(train, train_labels, val, val_labels, k=10).accuracy == pytest.approx(accuracy)


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    k=st.integers(1, 40),
    chunk=st.integers(7, 100),
    scale=st.sampled_from([1e-6, 1e-2, 3.0, 1e5]),
    repeated=st.booleans(),
)
def test_scale_order_and_chunk_change_nothing(seed, k, chunk, scale, repeated):
    train, train_labels, val, val_labels = clusters(seed)
    if repeated:  # small integers: many images with exactly the same similarity and different classes
        train, val = train.sign(), val.sign()
        train[:, 4:] = val[:, 4:] = 0
    expected = weighted_knn(train, train_labels, val, val_labels, k=k)
    bank, queries = (torch.from_numpy(np.random.default_rng(seed).permutation(len(a))) for a in (train, val))
    # A scale that rounds would break exact ties, so with repeated images it is a power of two.
    scale = 2.0 ** round(np.log2(scale)) if repeated else scale
    changed = weighted_knn(
        scale * train[bank], train_labels[bank], scale * val[queries], val_labels[queries], k=k, chunk=chunk
    )
    assert changed == expected


def test_equally_similar_images_vote_by_the_smaller_class():
    bank = torch.ones(8, 2)
    labels = torch.tensor([3, 2, 1, 0, 3, 2, 1, 0])
    query, truth = torch.ones(1, 2), torch.tensor([0])
    for chunk in (1, 3, 8):
        assert weighted_knn(bank, labels, query, truth, k=2, chunk=chunk).accuracy == 100.0


def shared(queries: int) -> KNNResult:
    data = clusters(seed=5, queries=queries)
    return weighted_knn(*data, k=7, rank=dist.get_rank(), world_size=dist.get_world_size())


@pytest.mark.parametrize("queries", [41, 6])
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_share_the_queries_and_get_one_result(workers, ranks, queries):
    expected = weighted_knn(*clusters(seed=5, queries=queries), k=7)
    assert workers(ranks).run(shared, queries) == [expected] * ranks


def of_one_query() -> KNNResult:
    bank, labels = torch.eye(6), torch.arange(6)
    return weighted_knn(bank, labels, bank[:1], labels[:1], k=1, rank=dist.get_rank(), world_size=2)


def test_a_rank_without_queries_gets_the_result_too(workers):
    assert [(result.accuracy, result.queries) for result in workers(2).run(of_one_query)] == [(100.0, 1)] * 2


def test_k_is_cut_to_the_bank_and_recorded():
    data = clusters(seed=1, bank=12)
    assert weighted_knn(*data, k=200) == weighted_knn(*data, k=12)
    assert weighted_knn(*data, k=200).k == 12


@pytest.mark.parametrize(("bank", "k"), [(19_999, 20), (20_000, 200)])
def test_auto_k_follows_the_size_of_the_bank(bank, k):
    features, labels = torch.randn(bank, 2), torch.arange(bank) % 3
    result = weighted_knn(features, labels, features[:2], labels[:2])
    assert result == KNNResult(result.accuracy, None, k, 0.1, queries=2, bank=bank)


def test_top5_does_not_count_classes_without_a_vote():
    features, labels = torch.eye(6), torch.arange(6)
    query, truth = torch.tensor([[1.0, 0, 0, 0, 0, 0]]), torch.tensor([5])
    assert weighted_knn(features, labels, query, truth, k=1).top5 == 0.0
    assert weighted_knn(features, labels, query, torch.tensor([0]), k=1).top5 == 100.0


def test_small_temperature_does_not_overflow():
    data = clusters(seed=3)
    assert weighted_knn(*data, k=5, temperature=1e-4).accuracy == weighted_knn(*data, k=1).accuracy


def test_half_precision_features_are_compared_in_fp32():
    train, train_labels, val, val_labels = clusters(seed=4)
    train, val = train.bfloat16(), val.bfloat16()
    expected = weighted_knn(train.float(), train_labels, val.float(), val_labels)
    assert weighted_knn(train, train_labels, val, val_labels) == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train_labels": torch.tensor([0, -1])}, "-1"),
        ({"train_features": torch.tensor([[1.0, float("nan")], [1.0, 1.0]])}, "non-finite"),
        ({"val_features": torch.ones(1, 3)}, "one encoder"),
        ({"val_features": torch.ones(0, 2), "val_labels": torch.ones(0, dtype=torch.int64)}, "n > 0"),
        ({"k": 0}, "k \\(0\\)"),
        ({"temperature": 0.0}, "temperature"),
    ],
)
def test_senseless_input_is_refused_with_the_value(change, message):
    arguments = {
        "train_features": torch.ones(2, 2),
        "train_labels": torch.tensor([0, 1]),
        "val_features": torch.ones(1, 2),
        "val_labels": torch.tensor([1]),
    }
    with pytest.raises(ValueError, match=message):
        weighted_knn(**(arguments | change))
