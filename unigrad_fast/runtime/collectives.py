"""Kind and bytes of the collectives that pass torch's dispatcher on this rank."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from unigrad_fast.runtime.torch_private import TorchDispatchMode, tree_leaves

# Gathers into one tensor. torch is renaming this function and warns about the old name.
gather_into: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)
KINDS = {
    "allgather_": "gather", "_allgather_base_": "gather", "allreduce_": "reduce", "broadcast_": "broadcast",
    "alltoall_base_": "exchange",
}  # fmt: skip


def counted(short: str, operands: Sequence[Tensor]) -> tuple[str, int]:
    """The kind of a collective and the bytes of its largest operand on this rank.

    Args:
        short: the operator's name without `c10d::`.
        operands: its tensors; the largest is the result for a gather into one tensor, one rank's part for a gather into
            a list.
    """
    return KINDS.get(short, short), max(math.prod(each.shape) * each.element_size() for each in operands)


@dataclass
class Sum:
    """Number and bytes of the collectives of one kind."""

    count: int = 0
    bytes: int = 0


class CollectiveSpy(TorchDispatchMode):
    """Counts the collectives that this thread and its backward passes start inside, also those of libraries.

    Attributes:
        found: totals by kind.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, Sum] = defaultdict(Sum)

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, operands = operator._schema.name, tree_leaves((args, kwargs or {}))
        tensors = [each for each in operands if isinstance(each, Tensor)]
        if name.startswith("c10d::") and tensors:
            kind, size = counted(name.removeprefix("c10d::"), tensors)
            self.found[kind].count += 1
            self.found[kind].bytes += size
        return operator(*args, **(kwargs or {}))
