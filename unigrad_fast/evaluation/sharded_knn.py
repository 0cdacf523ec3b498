"""Weighted kNN over a bank that is sharded over the ranks: each searches its own rows, and the k best are merged.

In a round, every rank sends some of its queries to all ranks, searches its own rows of the bank for the nearest
neighbours of all these queries, and returns the k best of each query to its rank. Similarities are exact (`shares`),
and among equally similar images those of the smaller classes vote, so neighbours, votes and accuracy do not depend on
the number of ranks.

Beside the shares (16 bits per number: 5.2 GB for ImageNet's training images, over all ranks) a rank needs about

    8 · chunk · dim  +  44 · chunk²  +  36 · chunk · k  +  48 · chunk · (k + classes)   bytes

and in total sends its queries (2 · dim bytes each) and the results for the others' queries (12 · k bytes each).
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
        bank, queries: this rank's shares; ranks may have different numbers of rows, or none.
        k, temperature, chunk: as in `weighted_knn`; a round has about `chunk` queries.
    """
    all_labels = torch.cat([bank.labels, queries.labels])
    classes = _over_ranks(torch.tensor(int(all_labels.max()) + 1 if len(all_labels) else 0), world, dist.ReduceOp.MAX)
    in_bank = _over_ranks(torch.bincount(bank.labels, minlength=int(classes)), world)
    most = int(_over_ranks(torch.tensor(len(queries.labels)), world, dist.ReduceOp.MAX))
    count = int(in_bank.sum())
    k = neighbours(k, count)
    share = max(1, chunk // world.size)  # queries of a rank in a round
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
    """Similarity (times the query's norm) and label of the k nearest neighbours of this rank's queries, over all ranks.

    Args:
        own_QD: this rank's queries, on the device, no more than `rows`, which is the same on all ranks.

    Returns:
        fp32 and int64 [rows, K]; rows after those of the queries are padding.
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
    """All ranks' results for this rank's queries, [rows, ranks · K], from those for all queries, [ranks · rows, K]."""
    received = torch.empty_like(found)
    dist.all_to_all_single(received, found)
    return torch.cat(received.chunk(world.size), dim=1)


def _over_ranks(number: Tensor, world: World, operation: Any = dist.ReduceOp.SUM) -> Tensor:
    if world.size > 1:
        dist.all_reduce(number, operation)
    return number
