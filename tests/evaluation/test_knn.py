"""Weighted kNN against a reference that follows the definition, and the laws that it obeys."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import top_k_accuracy_score
from sklearn.neighbors import KNeighborsClassifier
from torchmetrics.classification import MulticlassAccuracy

from unigrad_fast.evaluation.features import LeftOut
from unigrad_fast.evaluation.knn import KNNResult, count_hits, sharded_knn
from unigrad_fast.evaluation.shares import Share, norms, rounded
from unigrad_fast.runtime.errors import UserError
from unigrad_fast.runtime.process_group import World

ALONE = World(0, 1, 0, 1, torch.device("cpu"), "gloo")
NONE = LeftOut(0, 1, None)


def weighted_knn(train, train_labels, val, val_labels, k="auto", temperature: float = 0.1, **settings) -> KNNResult:
    """The classifier of one rank, which has all images."""
    bank, queries = Share(rounded(train), train_labels, NONE), Share(rounded(val), val_labels, NONE)
    return sharded_knn(bank, queries, ALONE, k, temperature, **settings)


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
    train, train_labels, val, val_labels = data
    exact = reference(rounded(train).double(), train_labels, rounded(val).double(), val_labels, k, temperature)
    assert (result.accuracy, result.top5) == pytest.approx(exact)
    assert result.accuracy < 100  # the clusters overlap, so the comparison says something


def judged_by_others(scores: np.ndarray, truth: np.ndarray) -> tuple[float, float]:
    """Top-1 and top-5 in percent of scores [N, K] without ties, by torchmetrics and by scikit-learn, which agree."""
    classes, found = scores.shape[1], []
    for k in (1, 5):
        metric = MulticlassAccuracy(classes, top_k=k, average="micro")
        theirs = metric(torch.from_numpy(scores), torch.from_numpy(truth)).item()
        assert theirs == pytest.approx(top_k_accuracy_score(truth, scores, k=k, labels=range(classes)), abs=1e-6)
        found.append(100 * theirs)
    return tuple(found)


def votes_of_scikit_learn(bank: Share, queries: Share, k: int, temperature: float) -> np.ndarray:
    """Shares of the votes [Q, K]. For unit vectors s = 1 - d²/2; the factor exp(1/T) does not change a vote."""
    unit, asked = ((share.rows.double() / norms(share.rows)[:, None]).numpy() for share in (bank, queries))
    model = KNeighborsClassifier(k, weights=lambda d: np.exp(-(d**2) / 2 / temperature), algorithm="brute")
    return model.fit(unit, bank.labels.numpy()).predict_proba(asked)


@pytest.mark.parametrize(("k", "temperature"), [(40, 0.02), (40, 0.1), (90, 0.1), (90, 1.0)])
def test_top1_and_top5_are_those_of_torchmetrics_and_scikit_learn_for_its_votes(k, temperature):
    train, train_labels, val, truth = clusters(seed=k, classes=9)
    bank, queries = Share(rounded(train), train_labels, NONE), Share(rounded(val), truth, NONE)
    votes = votes_of_scikit_learn(bank, queries, k, temperature)
    assert (votes > 0).sum(axis=1).min() >= 5  # where fewer have votes, only our top-5 leaves the others out
    result = sharded_knn(bank, queries, ALONE, k, temperature)
    assert (result.accuracy, result.top5) == pytest.approx(judged_by_others(votes, truth.numpy()), abs=1e-4)
    assert result.accuracy < result.top5 < 100


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
    scale = 2.0 ** round(np.log2(scale))  # one that rounds would break exact ties
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


def test_more_neighbours_than_the_bank_has_images_are_refused_and_auto_takes_all_of_them():
    data = clusters(seed=1, bank=12)
    assert weighted_knn(*data) == weighted_knn(*data, k=12)
    with pytest.raises(UserError, match=r"^k = 13: exceeds the 12 training images; give at most 12, or auto$"):
        weighted_knn(*data, k=13)


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


def test_labels_that_are_far_apart_take_the_memory_of_those_that_occur():
    similarity, label = torch.tensor([[0.9, 0.8, 0.7]] * 4), torch.tensor([[0, 1, 1]] * 4)
    truth = torch.tensor([0, 1, 2, 1])
    hits = count_hits(similarity, label, truth, 6, 1.0, 2)
    assert torch.equal(count_hits(similarity, label * 10**12, truth * 10**12, 6 * 10**12, 1.0, 2), hits)


def test_small_temperature_does_not_overflow():
    data = clusters(seed=3)
    assert weighted_knn(*data, k=5, temperature=1e-4).accuracy == weighted_knn(*data, k=1).accuracy
