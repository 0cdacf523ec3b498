"""Weighted k-nearest-neighbour classification on frozen features.

The protocol of InstDisc (Wu et al., CVPR 2018) that MoCo and DINO report too: features are ℓ2-normalised, the
k images of the bank with the largest cosine similarity s vote for their class with weight exp(s / T), and the
class with the largest sum wins.

The search walks over the bank in blocks of `chunk` rows and, inside, over the queries in blocks of `chunk` rows, and
keeps the k best of each query. `sharded_knn` calls it, where each rank has a share of the bank.

Shapes: Q queries, B rows of the bank or a block of it, D dimensions, K neighbours.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

PROTOCOL = "weighted kNN"
BRANCH = "online backbone"  # the branch whose features a run reports
LARGE_BANK = 20_000  # images from which `k="auto"` means 200, the literature's value for ImageNet; 20 below


@dataclass(frozen=True)
class KNNResult:
    """Accuracy of a weighted kNN classifier and the settings that it holds for.

    accuracy: top-1, percent of the queries. top5: percent, or None when the bank has fewer than five classes.
    k: neighbours that voted, never more than the bank has. temperature: T of the votes exp(s / T).
    queries, bank: images that were classified, images that could vote.
    left_out: lines for the user on images that could not be used.
    """

    accuracy: float
    top5: float | None
    k: int
    temperature: float
    queries: int
    bank: int
    left_out: tuple[str, ...] = ()


def neighbours(k: int | Literal["auto"], bank: int) -> int:
    """How many of so many images vote."""
    return min(bank, (200 if bank >= LARGE_BANK else 20) if k == "auto" else k)


def nearest(
    bank_BD: Tensor,
    label_B: Tensor,
    query_QD: Tensor,
    k: int,
    chunk: int,
    similarity_to: Callable[[Tensor], Callable[[Tensor], Tensor]],
) -> tuple[Tensor, Tensor]:
    """Similarity and label of the k rows of the bank nearest to each query, [Q, K] each, where they are computed.

    Args:
        similarity_to: of some rows of the bank, what gives the similarities [Q, B] of some queries to them.
    """
    blocks = query_QD.split(chunk)
    best: list = [None] * len(blocks)
    # The bank is the outer loop: it is the larger one, and so it travels to the device once.
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
    """The k largest similarities of each row with their labels; of equal ones those of the smaller classes."""
    if similarity.shape[1] <= k:
        return similarity, label
    value, column = similarity.topk(k, dim=1)
    # topk leaves open which of equal values it takes, which matters only where it left some of them out.
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
    """For how many queries the true class wins the votes, and is among the best five; int64 [2], all on the CPU.

    Args:
        similarity, label: of each query's nearest, [Q, K].
        truth: int64 [Q].
    """
    hits = torch.zeros(2, dtype=torch.int64)
    for rows in torch.arange(len(truth)).split(chunk):
        place = _rank_of_truth(similarity[rows], label[rows], truth[rows], classes, temperature)
        hits += torch.stack([(place < 1).sum(), (place < 5).sum()])
    return hits


def _rank_of_truth(similarity: Tensor, label: Tensor, truth: Tensor, classes: int, temperature: float) -> Tensor:
    """Place of the true class in the votes, 0 for the winner; `classes` where it has no vote. int64 [Q]."""
    similarity = similarity.double()
    # Dividing a row by its largest weight changes no comparison and keeps exp from overflowing at small T.
    # Summed from the most similar neighbour on, so that rounding does not depend on the order of the bank.
    similarity, nearest = similarity.sort(dim=1, descending=True, stable=True)
    weight = ((similarity - similarity[:, :1]) / temperature).exp()
    votes = torch.zeros(len(truth), classes, dtype=torch.float64)
    votes.scatter_add_(1, label.gather(1, nearest), weight)
    own = votes.gather(1, truth[:, None])
    smaller_class = torch.arange(classes) < truth[:, None]
    rank = ((votes > own) | ((votes == own) & smaller_class)).sum(dim=1)
    return torch.where(own[:, 0] > 0, rank, classes)
