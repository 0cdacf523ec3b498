"""Weighted k-nearest-neighbour classification on frozen features.

The protocol of InstDisc (Wu et al., CVPR 2018) that MoCo and DINO report too: features are ℓ2-normalised, the
k images of the bank with the largest cosine similarity s vote for their class with weight exp(s / T), and the
class with the largest sum wins.

Memory. The search walks over the bank in blocks of `chunk` rows and, inside, over the queries in blocks of
`chunk` rows, and keeps the k best of each query. Beside the features that the caller holds, it needs at most
about

    16 · chunk · dim  +  44 · chunk²  +  32 · queries · k  +  48 · chunk · (k + classes)   bytes

where the second term falls to 9 · chunk² unless similarities tie. The 1.28 million by 2048 features of
ImageNet, 50,000 queries, k = 200 and the default chunk take under 0.9 GB (1.5 GB with ties in every row); the
bank itself stays where it is (10.5 GB in fp32) and visits the device block by block, once.

Shapes: Q queries, B rows of the bank or a block of it, D dimensions, K neighbours.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import normalize

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
        train_features: the bank, [n, D], any floating dtype (fp32 arithmetic, float64 where the features are
            float64).
        train_labels: int64 [n], all ≥ 0.
        val_features: the queries, [q, D].
        val_labels: int64 [q], all ≥ 0.
        k: neighbours that vote, cut to the size of the bank; "auto" is 200 for a bank of at least 20,000
            images, else 20.
        temperature: T of the votes exp(s / T).
        chunk: rows per block; bounds the memory (module docstring) and changes nothing but the rounding of s.
        device: where similarities are computed; by default where the bank lies.
        rank, world_size: above 1 every rank of the default process group calls this together with the same features,
            and classifies its share of the queries; all get the result.

    Neither the order of the bank nor that of the queries matters: among equally similar images those with the
    smaller class number vote, and among equal votes the smaller class number wins. A class without a vote is
    never a top-5 hit.

    Raises ValueError where shapes, labels, features, k or temperature make no sense.
    """
    _check(train_features, train_labels, "train")
    _check(val_features, val_labels, "val")
    if train_features.shape[1] != val_features.shape[1]:
        raise ValueError(
            f"train features have {train_features.shape[1]} dimensions and val features "
            f"{val_features.shape[1]}; both must come from one encoder"
        )
    if k == "auto":
        k = 200 if len(train_features) >= LARGE_BANK else 20
    if k < 1 or chunk < 1 or not temperature > 0:
        raise ValueError(f"k ({k}), chunk ({chunk}) and temperature ({temperature}) must be positive")
    k = min(k, len(train_features))

    # In this order of the bank a smaller position is a smaller class, which is how ties are decided.
    train_labels, order = train_labels.cpu().sort(stable=True)
    val_labels = val_labels.cpu()
    classes = int(max(train_labels.max(), val_labels.max())) + 1
    own_queries, own_labels = val_features[rank::world_size], val_labels[rank::world_size]
    hits = torch.zeros(2, dtype=torch.int64)
    if len(own_labels):
        device = device or train_features.device
        similarity, position = _neighbours(train_features, order, own_queries, k, chunk, device)
        neighbour_label = train_labels[position]
        for rows in torch.arange(len(own_labels)).split(chunk):
            place = _rank_of_truth(similarity[rows], neighbour_label[rows], own_labels[rows], classes, temperature)
            hits += torch.stack([(place < 1).sum(), (place < 5).sum()])
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


def _check(features: Tensor, labels: Tensor, name: str) -> None:
    if features.ndim != 2 or labels.shape != features.shape[:1] or len(labels) == 0:
        raise ValueError(
            f"{name} features {list(features.shape)} and labels {list(labels.shape)} must be [n, D] and [n], with n > 0"
        )
    if int(labels.min()) < 0:
        raise ValueError(f"{name} labels contain {int(labels.min())}; kNN needs a label ≥ 0 for every image")
    if not all(block.isfinite().all() for block in features.split(65536)):
        raise ValueError(f"{name} features contain non-finite values")


def _neighbours(
    bank_BD: Tensor, order: Tensor, query_QD: Tensor, k: int, chunk: int, device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """Similarity and position of the k rows of bank_BD[order] nearest to each query, [Q, K] on the CPU."""
    dtype = torch.float64 if bank_BD.dtype == torch.float64 else torch.float32

    def unit(rows: Tensor) -> Tensor:
        return normalize(rows.to(device, dtype), dim=1)

    blocks = [(start, min(start + chunk, len(query_QD))) for start in range(0, len(query_QD), chunk)]
    best: list[tuple[Tensor, Tensor] | None] = [None] * len(blocks)
    # The bank is the outer loop: it is the larger one, and so it travels to the device once.
    for bank_start in range(0, len(bank_BD), chunk):
        rows = order[bank_start : bank_start + chunk].to(bank_BD.device)
        unit_bank_BD = unit(bank_BD[rows])
        position_B = torch.arange(bank_start, bank_start + len(rows), device=device)
        for number, (start, stop) in enumerate(blocks):
            similarity_QB = unit(query_QD[start:stop]) @ unit_bank_BD.T
            found = _largest(similarity_QB, position_B.expand_as(similarity_QB), k)
            if best[number] is not None:
                both = [torch.cat(pair, dim=1) for pair in zip(best[number], found, strict=True)]
                found = _largest(*both, k)
            best[number] = found
    return torch.cat([s for s, _ in best]).cpu(), torch.cat([p for _, p in best]).cpu()


def _largest(similarity: Tensor, position: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest similarities of each row with their positions; of equal ones those placed first."""
    if similarity.shape[1] <= k:
        return similarity, position
    value, column = similarity.topk(k, dim=1)
    # topk leaves open which of equal values it takes, which matters only where it left some of them out.
    tied = ((similarity >= value[:, -1:]).sum(dim=1) > k).nonzero()[:, 0]
    if len(tied):
        by_position = position[tied].argsort(dim=1)
        by_value = similarity[tied].gather(1, by_position).argsort(dim=1, descending=True, stable=True)
        column[tied] = by_position.gather(1, by_value[:, :k])
        value = similarity.gather(1, column)
    return value, position.gather(1, column)


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
