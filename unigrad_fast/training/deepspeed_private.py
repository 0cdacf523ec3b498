"""The private parts of DeepSpeed's ZeRO optimizer, stages 1 and 2, that `fragments` is built on.

DeepSpeed is pinned because of them. Nothing else in the package names them, and
`tests/training/test_deepspeed_private.py` says which one an installed DeepSpeed lacks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor


class Place(NamedTuple):
    """Where this rank has a piece of a parameter.

    Attributes:
        start: its first element in the parameter.
        in_flat, numel: its first element in this rank's flat tensor, and how many there are.
    """

    start: int
    in_flat: int
    numel: int


def flat_masters(zero) -> list[Tensor]:
    """This rank's fp32 master weights, a flat tensor per parameter group."""
    return list(zero.single_partition_of_fp32_groups)


def parameter_groups(zero) -> list[list[Tensor]]:
    """The network's parameters, a list for each of `flat_masters`."""
    return zero.bit16_groups


def place_of(parameter: Tensor) -> Place | None:
    """Of a parameter of the network; None where this rank has nothing of it."""
    mapping = parameter._hp_mapping
    if mapping is None:
        return None
    there = mapping.hp_fragment_address
    return Place(mapping.lp_fragment_address.start, there.start, there.numel)


def gradient_parts(optimizer) -> Mapping[int, Sequence[Tensor]]:
    """By parameter group the averaged gradients, laid out one after the other like its flat tensor; none at stage 0."""
    return getattr(optimizer, "averaged_gradients", {})


def weight_parts(zero) -> Iterator[tuple[Sequence[Tensor], dist.ProcessGroup]]:
    """By parameter group the flat network weights, a part per rank, and the ranks among which they are divided."""
    return zip(zero.parallel_partitioned_bit16_groups, zero.real_dp_process_group, strict=True)
