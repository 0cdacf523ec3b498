"""Weighted k-nearest-neighbour classification on frozen features.

The protocol of InstDisc (Wu et al., CVPR 2018), also used by MoCo and DINO: features are ℓ2-normalised, the
k images of the bank with the largest cosine similarity s vote for their class with weight exp(s / T), and the
class with the largest sum wins.

Memory. The outer loop goes over blocks of `chunk` rows of the bank, the inner loop over blocks of `chunk` queries, and
the k best of each query are kept. Beside the features that the caller holds, this needs at most about

    16 · chunk · dim  +  44 · chunk²  +  32 · queries · k  +  48 · chunk · (k + classes)   bytes

where the second term falls to 9 · chunk² if no similarities tie. The 1.28 million by 2048 features of
ImageNet, 50,000 queries, k = 200 and the default chunk take under 0.9 GB (1.5 GB with ties in every row); the
bank itself (10.5 GB in fp32) is copied to the device once, block by block.

Shapes: Q queries, B rows of the bank or a block of it, D dimensions, K neighbours.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import normalize

PROTOCOL = "weighted kNN"
BRANCH = "online backbone"  # the branch whose features a run evaluates
LARGE_BANK = 20_000  # from this size on `k="auto"` is 200, the usual value for ImageNet; below it is 20


@dataclass(frozen=True)
class KNNResult:
    """Accuracy of a weighted kNN classifier, with its settings.

    accuracy: top-1, percent of the queries. top5: percent, or None if the bank has fewer than five classes.
    k: neighbours that voted, at most the size of the bank. temperature: T of the votes exp(s / T).
    queries, bank: numbers of images that were classified, and that could vote.
    left_out: lines for the user about images that could not be used.
    """

    accuracy: float
    top5: float | None
    k: int
    temperature: float
    queries: int
    bank: int
    left_out: tuple[str, ...] = ()


@torch.no_grad()
def weighted_knn(
    train_features: Tensor,
    train_labels: Tensor,
    val_features: Tensor,
    val_labels: Tensor,
    k: int | Literal["auto"] = "auto",
    temperature: float = 0.1,
    chunk: int = 4096,
    device: torch.device | str | None = None,
    rank: int = 0,
    world_size: int = 1,
) -> KNNResult:
    """Classifies the validation features by the votes of their nearest training features.

    Args:
        train_features: the bank, [n, D], any floating dtype (fp32 arithmetic, float64 if the features are
            float64).
        train_labels: int64 [n], all ≥ 0.
        val_features: the queries, [q, D].
        val_labels: int64 [q], all ≥ 0.
        k: neighbours that vote, at most the size of the bank; "auto" is 200 for a bank of at least 20,000
            images, else 20.
        temperature: T of the votes exp(s / T).
        chunk: rows per block; bounds the memory (module docstring) and affects only the rounding of s.
        device: device that computes similarities; by default that of the bank.
        rank, world_size: above 1 every rank of the default process group calls this together with the same features,
            and classifies its share of the queries; all get the result.

    Neither the order of the bank nor that of the queries matters: among equally similar images those with the
    smaller class number vote, and among equal votes the smaller class number wins. A class without a vote is
    never a top-5 hit.

    Raises ValueError if shapes, labels, features, k or temperature are invalid.
    """
    _check(train_features, train_labels, "train")
    _check(val_features, val_labels, "val")
    if train_features.shape[1] != val_features.shape[1]:
        raise ValueError(
            f"train features have {train_features.shape[1]} dimensions and val features "
            f"{val_features.shape[1]}; both must come from one encoder"
        )
    k = neighbours(k, len(train_features))
    if k < 1 or chunk < 1 or not temperature > 0:
        raise ValueError(f"k ({k}), chunk ({chunk}) and temperature ({temperature}) must be positive")

    train_labels, val_labels = train_labels.cpu(), val_labels.cpu()
    classes = int(max(train_labels.max(), val_labels.max())) + 1
    own_queries, own_labels = val_features[rank::world_size], val_labels[rank::world_size]
    hits = torch.zeros(2, dtype=torch.int64)
    if len(own_labels):
        device = torch.device(device or train_features.device)
        dtype = torch.float64 if train_features.dtype == torch.float64 else torch.float32

        def similarity_to(bank_rows: Tensor) -> Callable[[Tensor], Tensor]:
            unit_bank_BD = normalize(bank_rows.to(device, dtype), dim=1)
            return lambda rows: normalize(rows.to(device, dtype), dim=1) @ unit_bank_BD.T

        found = nearest(train_features, train_labels, own_queries, k, chunk, similarity_to)
        hits += count_hits(*(each.cpu() for each in found), own_labels, classes, temperature, chunk)
    if world_size > 1:
        dist.all_reduce(hits)
    top1, top5 = hits.tolist()
    enough = len(train_labels.unique()) >= 5
    return KNNResult(
        accuracy=100 * top1 / len(val_labels),
        top5=100 * top5 / len(val_labels) if enough else None,
        k=k,
        temperature=temperature,
        queries=len(val_labels),
        bank=len(train_labels),
    )


def neighbours(k: int | Literal["auto"], bank: int) -> int:
    """Number of neighbours that vote, for a bank of this size."""
    return min(bank, (200 if bank >= LARGE_BANK else 20) if k == "auto" else k)


def _check(features: Tensor, labels: Tensor, name: str) -> None:
    if features.ndim != 2 or labels.shape != features.shape[:1] or len(labels) == 0:
        raise ValueError(
            f"{name} features {list(features.shape)} and labels {list(labels.shape)} must be [n, D] and [n], with n > 0"
        )
    if int(labels.min()) < 0:
        raise ValueError(f"{name} labels contain {int(labels.min())}; kNN needs a label ≥ 0 for every image")
    if not all(block.isfinite().all() for block in features.split(65536)):
        raise ValueError(f"{name} features contain non-finite values")


def nearest(
    bank_BD: Tensor,
    label_B: Tensor,
    query_QD: Tensor,
    k: int,
    chunk: int,
    similarity_to: Callable[[Tensor], Callable[[Tensor], Tensor]],
) -> tuple[Tensor, Tensor]:
    """Similarity and label of the k rows of the bank nearest to each query, [Q, K] each.

    Args:
        similarity_to: takes rows of the bank; returns a function from queries to their similarities [Q, B].
    """
    blocks = query_QD.split(chunk)
    best: list = [None] * len(blocks)
    # The bank is the outer loop: it is larger, and this way it is copied to the device only once.
    for bank_rows, label in zip(bank_BD.split(chunk), label_B.split(chunk), strict=True):
        similarity = similarity_to(bank_rows)
        for number, rows in enumerate(blocks):
            similarity_QB = similarity(rows)
            found = largest(similarity_QB, label.to(similarity_QB.device).expand_as(similarity_QB), k)
            if (before := best[number]) is not None:
                found = largest(*(torch.cat(pair, dim=1) for pair in zip(before, found, strict=True)), k)
            best[number] = found
    return torch.cat([each[0] for each in best]), torch.cat([each[1] for each in best])


def largest(similarity: Tensor, label: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest similarities of each row with their labels; ties go to the smaller classes."""
    if similarity.shape[1] <= k:
        return similarity, label
    value, column = similarity.topk(k, dim=1)
    # topk picks any of equal values, which matters only if it left some of them out.
    tied = ((similarity >= value[:, -1:]).sum(dim=1) > k).nonzero()[:, 0]
    if len(tied):
        by_label = label[tied].argsort(dim=1)
        by_value = similarity[tied].gather(1, by_label).argsort(dim=1, descending=True, stable=True)
        column[tied] = by_label.gather(1, by_value[:, :k])
        value = similarity.gather(1, column)
    return value, label.gather(1, column)


def count_hits(
    similarity: Tensor, label: Tensor, truth: Tensor, classes: int, temperature: float, chunk: int
) -> Tensor:
    """Numbers of top-1 and top-5 hits of the votes, int64 [2]; everything on the CPU.

    Args:
        similarity, label: of the nearest neighbours of each query, [Q, K].
        truth: int64 [Q].
    """
    hits = torch.zeros(2, dtype=torch.int64)
    for rows in torch.arange(len(truth)).split(chunk):
        place = _rank_of_truth(similarity[rows], label[rows], truth[rows], classes, temperature)
        hits += torch.stack([(place < 1).sum(), (place < 5).sum()])
    return hits


def _rank_of_truth(similarity: Tensor, label: Tensor, truth: Tensor, classes: int, temperature: float) -> Tensor:
    """Rank of the true class in the votes, int64 [Q]; 0 for the winner, `classes` if it has no vote."""
    similarity = similarity.double()
    # Dividing a row by its largest weight changes no comparison, and keeps exp from overflowing at small T.
    # Votes are summed from the most similar neighbour on, so that rounding does not depend on the order of the bank.
    similarity, nearest = similarity.sort(dim=1, descending=True, stable=True)
    weight = ((similarity - similarity[:, :1]) / temperature).exp()
    votes = torch.zeros(len(truth), classes, dtype=torch.float64)
    votes.scatter_add_(1, label.gather(1, nearest), weight)
    own = votes.gather(1, truth[:, None])
    smaller_class = torch.arange(classes) < truth[:, None]
    rank = ((votes > own) | ((votes == own) & smaller_class)).sum(dim=1)
    return torch.where(own[:, 0] > 0, rank, classes)
