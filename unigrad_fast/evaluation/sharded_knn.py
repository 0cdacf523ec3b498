"""Weighted kNN over a bank of which every rank has a share: each looks in its own rows, and the k best are merged.

In a round every rank gives some of its queries to all, looks for the nearest of all of these among its own rows of the
bank, and gives each query's k best back to the rank that has it. Similarities are exact (`shares`), and of equally
similar images those of the smaller classes vote: neighbours, votes and accuracy are those of the whole bank, whatever
the number of ranks.

Beside the shares (16 bits per number: 5.2 GB of ImageNet's training images, over all ranks) a rank needs about

    8 · chunk · dim  +  44 · chunk²  +  36 · chunk · k  +  48 · chunk · (k + classes)   bytes

and in all sends its queries to the others (2 · dim bytes each), and what it found for theirs back (12 · k bytes each).
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from unigrad_fast.evaluation.knn import KNNResult, count_hits, largest, nearest, neighbours
from unigrad_fast.evaluation.shares import Share, norms, similarity_to
from unigrad_fast.runtime.collectives import gather_into
from unigrad_fast.runtime.process_group import World


@torch.no_grad()
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
        k: neighbours that vote, cut to the size of the bank; "auto" is 200 for a bank of at least 20,000 images,
            else 20.
        temperature: T of the votes exp(s / T).
        chunk: rows per block, and about as many queries in a round; it bounds the memory and changes nothing else.

    Neither the order of the bank nor that of the queries matters: among equally similar images those with the smaller
    class number vote, and among equal votes the smaller class number wins. A class without a vote is never a top-5 hit.
    """
    all_labels = torch.cat([bank.labels, queries.labels])
    classes = _over_ranks(torch.tensor(int(all_labels.max()) + 1 if len(all_labels) else 0), world, dist.ReduceOp.MAX)
    in_bank = _over_ranks(torch.bincount(bank.labels, minlength=int(classes)), world)
    most = int(_over_ranks(torch.tensor(len(queries.labels)), world, dist.ReduceOp.MAX))
    count = int(in_bank.sum())
    k = neighbours(k, count)
    share = max(1, chunk // world.size)  # of a rank's queries, in a round
    totals = torch.tensor([0, 0, len(queries.labels)])
    for start in range(0, most, share):
        own, truth = queries.rows[start : start + share], queries.labels[start : start + share]
        found = _found(bank, own.to(world.device), min(share, most - start), world, k, chunk)
        product, label = (each[: len(truth)].cpu() for each in found)
        similarity = product / norms(own.cpu())[:, None]
        totals[:2] += count_hits(similarity, label, truth, int(classes), temperature, chunk)
    top1, top5, judged = _over_ranks(totals, world).tolist()
    return KNNResult(
        accuracy=100 * top1 / judged,
        top5=100 * top5 / judged if int((in_bank > 0).sum()) >= 5 else None,
        k=k,
        temperature=temperature,
        queries=judged,
        bank=count,
    )


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
        found = nearest(bank.rows, bank.labels, asked_QD, k, chunk, partial(similarity_to, device=world.device))
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


def _over_ranks(number: Tensor, world: World, operation: Any = dist.ReduceOp.SUM) -> Tensor:
    if world.size > 1:
        dist.all_reduce(number, operation)
    return number
