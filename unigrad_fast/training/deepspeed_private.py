"""The private parts of DeepSpeed: those of its ZeRO optimizer, stages 1 and 2, that `fragments` relies on, and the
dtype of the engine's autocast.

They are why DeepSpeed is pinned. No other module uses them, and `tests/training/test_deepspeed_private.py` reports
which one an installed DeepSpeed lacks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def compute_in(engine, dtype: torch.dtype | None) -> None:
    """Set the dtype of autocast in the engine's forward pass."""
    engine._config.torch_autocast_dtype = dtype


def flat_masters(zero) -> list[Tensor]:
    """This rank's fp32 master weights, one flat tensor per parameter group."""
    return list(zero.single_partition_of_fp32_groups)


def parameter_groups(zero) -> list[list[Tensor]]:
    """The network's parameters, one list for each of `flat_masters`."""
    return zero.bit16_groups


def place_of(parameter: Tensor) -> tuple[int, int, int] | None:
    """Of this rank's piece of a parameter: first element in the parameter and in the flat tensor, number of elements.

    None if the rank has no piece of it.
    """
    mapping = parameter._hp_mapping
    if mapping is None:
        return None
    there = mapping.hp_fragment_address
    return mapping.lp_fragment_address.start, there.start, there.numel


def gradient_parts(optimizer) -> Mapping[int, Sequence[Tensor]]:
    """The averaged gradients by parameter group, one after the other as in its flat tensor; none at stage 0."""
    return getattr(optimizer, "averaged_gradients", {})


def weight_parts(zero) -> Iterator[tuple[Sequence[Tensor], dist.ProcessGroup]]:
    """By parameter group, the flat network weights, one part per rank, and the process group that shares them."""
    return zip(zero.parallel_partitioned_bit16_groups, zero.real_dp_process_group, strict=True)
