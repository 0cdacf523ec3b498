"""Collectives as torch has them: of which kind each is that passes its dispatcher, and its bytes on this rank."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from unigrad_fast.runtime.torch_private import TorchDispatchMode, tree_leaves

# Gathers into one tensor. The same under two names: torch renames it, and warns of the old one.
gather_into: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)
KINDS = {
    "allgather_": "gather", "_allgather_base_": "gather", "allreduce_": "reduce", "broadcast_": "broadcast",
    "alltoall_base_": "exchange",
}  # fmt: skip


def counted(short: str, operands: Sequence[Tensor]) -> tuple[str, int]:
    """The kind of a collective and its bytes, those of its largest operand here.

    Args:
        short: the operator's name without `c10d::`.
        operands: its tensors; of a gather into one tensor that is the result, of one into a list each rank's part.
    """
    return KINDS.get(short, short), max(math.prod(each.shape) * each.element_size() for each in operands)


@dataclass
class Sum:
    """Collectives of one kind: how many, and their bytes."""

    count: int = 0
    bytes: int = 0


class CollectiveSpy(TorchDispatchMode):
    """While inside, counts the collectives that this thread and its backward passes begin, of whichever library.

    Attributes:
        found: by kind.
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
