"""Weighted k-nearest-neighbour classification on frozen features, of which every rank has a share.

The protocol of InstDisc (Wu et al., CVPR 2018), also used by MoCo and DINO: features are ℓ2-normalised, the
k images of the bank with the largest cosine similarity s vote for their class with weight exp(s / T), and the
class with the largest sum wins.

In a round every rank gives some of its queries to all, looks for the nearest of all of these among its own rows of the
bank, and gives each query's k best back to the rank that has it. Similarities are exact (`shares`), and of equally
similar images those of the smaller classes vote: neighbours, votes and accuracy are those of the whole bank, whatever
the number of ranks.

Beside the shares (16 bits per number: 5.2 GB of ImageNet's training images, over all ranks) a rank needs about

    8 · chunk · dim  +  44 · chunk²  +  36 · chunk · k  +  48 · chunk · (k + classes)   bytes

for the classes that occur, and in all sends its queries to the others (2 · dim bytes each), and what it found for
theirs back (12 · k bytes each).

Shapes: Q queries, B rows of the bank or a block of it, D dimensions, K neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from unigrad_fast.evaluation.shares import Share, norms, similarity_to
from unigrad_fast.runtime.collectives import gather_into
from unigrad_fast.runtime.errors import UserError
from unigrad_fast.runtime.process_group import World
from unigrad_fast.runtime.wording import count

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
    components: principal components that hold 90 % of the variance of the bank's features; None if not counted.
    """

    accuracy: float
    top5: float | None
    k: int
    temperature: float
    queries: int
    bank: int
    left_out: tuple[str, ...] = ()
    components: int | None = None


def sharded_knn(
    bank: Share,
    queries: Share,
    world: World,
    k: int | Literal["auto"] = "auto",
    temperature: float = 0.1,
    chunk: int = 4096,
) -> KNNResult:
    """Classifies all ranks' queries by the votes of their nearest rows among all ranks' banks.

    All ranks call this together, and all get the result.

    Args:
        bank, queries: this rank's; of either another rank may have more, fewer or none.
        k: neighbours that vote, at most the size of the bank; "auto" is 200 for a bank of at least 20,000 images, else
            20, or the whole bank if it is smaller.
        temperature: T of the votes exp(s / T).
        chunk: rows per block, and about as many queries in a round; it bounds the memory and changes nothing else.

    Neither the order of the bank nor that of the queries matters: among equally similar images those with the smaller
    class number vote, and among equal votes the smaller class number wins. A class without a vote is never a top-5 hit.

    Raises:
        UserError: on all ranks, if k exceeds the size of the bank.
    """
    (result,) = sharded_knn_grid(bank, queries, world, [(k, temperature)], chunk)
    return result


@torch.no_grad()
def sharded_knn_grid(
    bank: Share,
    queries: Share,
    world: World,
    cells: Sequence[tuple[int | Literal["auto"], float]],
    chunk: int = 4096,
) -> list[KNNResult]:
    """As `sharded_knn`, for pairs of k and temperature, from one search for the largest k; each has its own result."""
    all_labels = torch.cat([bank.labels, queries.labels])
    classes = over_ranks(torch.tensor(int(all_labels.max()) + 1 if len(all_labels) else 0), world, dist.ReduceOp.MAX)
    in_bank = over_ranks(torch.bincount(bank.labels, minlength=int(classes)), world)
    images = int(in_bank.sum())
    settled = [(settled_k(k, images), temperature) for k, temperature in cells]
    widest = max(k for k, _ in settled)
    require_k(widest, images)
    hits = torch.zeros(len(settled), 2, dtype=torch.int64)
    for similarity, label, truth in neighbours(bank, queries, world, widest, chunk):
        nearest_of = {k: largest(similarity, label, k) for k in {k for k, _ in settled}}
        for hit, (k, temperature) in zip(hits, settled, strict=True):
            hit += count_hits(*nearest_of[k], truth, int(classes), temperature, chunk)
    over_ranks(hits, world)
    judged = int(over_ranks(torch.tensor(len(queries.labels)), world))
    return [
        KNNResult(
            accuracy=100 * top1 / judged,
            top5=100 * top5 / judged if int((in_bank > 0).sum()) >= 5 else None,
            k=k,
            temperature=temperature,
            queries=judged,
            bank=images,
        )
        for (top1, top5), (k, temperature) in zip(hits.tolist(), settled, strict=True)
    ]


@torch.no_grad()
def neighbours(
    bank: Share, queries: Share, world: World, k: int, chunk: int = 4096
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The k rows of all ranks' banks nearest to this rank's queries, some queries at a time; all ranks do it together.

    Gives the cosine similarity, float64, and the label of each neighbour, [Q, K], in no order, and the labels of the
    queries, [Q]; all on the CPU. Of equally similar rows those of the smaller labels are taken.

    Args:
        k: at most the size of the bank, over all ranks.
    """
    most = int(over_ranks(torch.tensor(len(queries.labels)), world, dist.ReduceOp.MAX))
    share = max(1, chunk // world.size)  # of a rank's queries, in a round
    for start in range(0, most, share):
        own, truth = queries.rows[start : start + share], queries.labels[start : start + share]
        found = _found(bank, own.to(world.device), min(share, most - start), world, k, chunk)
        product, label = (each[: len(truth)].cpu() for each in found)
        yield product / norms(own.cpu())[:, None], label, truth


def settled_k(k: int | Literal["auto"], images: int) -> int:
    """The number of neighbours that vote, of a bank of so many images."""
    return min(images, 200 if images >= LARGE_BANK else 20) if k == "auto" else k


def require_k(k: int, bank: int) -> None:
    """Raises UserError if fewer images than k are in the bank."""
    if k > bank:
        raise UserError(f"k = {k}: exceeds the {count(bank, 'training image')}; give at most {bank}, or auto")


def _found(bank: Share, own_QD: Tensor, rows: int, world: World, k: int, chunk: int) -> tuple[Tensor, Tensor]:
    """Similarity, times the norm of the query, and label of the k nearest in all ranks' banks to this rank's queries.

    Args:
        own_QD: this rank's queries, on the device, no more than `rows`, which is the same on all ranks.

    Returns:
        fp32 and int64 [rows, K]; behind those of the queries stand others, that mean nothing.
    """
    asked_QD = own_QD
    if world.size > 1:
        padded = own_QD.new_zeros(rows, own_QD.shape[1])
        padded[: len(own_QD)] = own_QD
        asked_QD = own_QD.new_empty(world.size * rows, own_QD.shape[1])
        gather_into(asked_QD, padded)
    similarity = torch.full((len(asked_QD), k), -torch.inf, device=world.device)
    label = torch.zeros(similarity.shape, dtype=torch.int64, device=world.device)
    if len(bank.labels):
        found = nearest(bank.rows, bank.labels, asked_QD, k, chunk, world.device)
        found_here = found[0].shape[1]  # a share may have fewer rows than k
        similarity[:, :found_here], label[:, :found_here] = found
    if world.size == 1:
        return similarity, label
    return largest(*(_back(each, world) for each in (similarity, label)), k)


def _back(found: Tensor, world: World) -> Tensor:
    """What all ranks found for this one's queries, [rows, ranks · K], of what each found for all, [ranks · rows, K]."""
    received = torch.empty_like(found)
    dist.all_to_all_single(received, found)
    return torch.cat(received.chunk(world.size), dim=1)


def over_ranks(number: Tensor, world: World, operation: Any = dist.ReduceOp.SUM) -> Tensor:
    """A tensor reduced over ranks, in place."""
    if world.size > 1:
        dist.all_reduce(number, operation)
    return number


def nearest(
    bank_BD: Tensor, label_B: Tensor, query_QD: Tensor, k: int, chunk: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Similarity, times the norm of the query, and label of the k rows of a bank nearest to each query, [Q, K] each."""
    blocks = query_QD.split(chunk)
    best: list = [None] * len(blocks)
    # The bank is the outer loop: it is larger, and this way it is copied to the device only once.
    for bank_rows, label in zip(bank_BD.split(chunk), label_B.split(chunk), strict=True):
        similarity = similarity_to(bank_rows, device)
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
    similarity: Tensor, label: Tensor, truth: Tensor, classes: int, temperature: float, chunk: int = 4096
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
    occurring, votes = _votes(similarity, label, truth, temperature)
    truth = torch.searchsorted(occurring, truth)[:, None]
    own = votes.gather(1, truth)
    smaller_class = torch.arange(len(occurring)) < truth
    rank = ((votes > own) | ((votes == own) & smaller_class)).sum(dim=1)
    return torch.where(own[:, 0] > 0, rank, classes)


def predicted(similarity: Tensor, label: Tensor, temperature: float) -> Tensor:
    """The class that wins the votes of the nearest neighbours of each query, [Q, K]; int64 [Q]. All on the CPU."""
    occurring, votes = _votes(similarity, label, label[:, 0], temperature)
    return occurring[torch.from_numpy(votes.numpy().argmax(axis=1))]  # the first of equal votes


def _votes(similarity: Tensor, label: Tensor, truth: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The classes of the neighbours and of `truth`, int64 [C] ascending, and the votes for each, float64 [Q, C]."""
    similarity = similarity.double()
    # Dividing a row by its largest weight changes no comparison, and keeps exp from overflowing at small T.
    # Votes are summed from the most similar neighbour on, so that rounding does not depend on the order of the bank.
    similarity, nearest = similarity.sort(dim=1, descending=True, stable=True)
    weight = ((similarity - similarity[:, :1]) / temperature).exp()
    # Only classes that occur here, in order: labels may be far apart.
    occurring, place = torch.cat([label.gather(1, nearest), truth[:, None]], dim=1).unique(return_inverse=True)
    votes = torch.zeros(len(truth), len(occurring), dtype=torch.float64)
    return occurring, votes.scatter_add_(1, place[:, :-1], weight)
