"""The private parts of torch that the package uses, except those in `kernels/torch_private.py`.

torch may change or drop any of them with a release. No other module of the package uses them, and
`tests/runtime/test_torch_private.py` reports which one an installed torch lacks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import register_pytree_node, tree_leaves, tree_map

__all__ = [
    "DataDependentOutputException",
    "FakeTensorMode",
    "TorchDispatchMode",
    "register_pytree_node",
    "tree_leaves",
    "tree_map",
]

BatchNorm = _BatchNorm  # base class, for any number of dimensions

# Operations on many tensors at once, as used by torch's optimizers.
foreach_add = torch._foreach_add
foreach_add_ = torch._foreach_add_
foreach_addcmul_ = torch._foreach_addcmul_
foreach_copy_ = torch._foreach_copy_
foreach_lerp_ = torch._foreach_lerp_
foreach_mul = torch._foreach_mul
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm

spin = torch.cuda._sleep
"""Keeps the current stream busy for so many clock cycles."""

FUSED_OPTIMIZERS = (torch.ops.aten._fused_sgd_, torch.ops.aten._fused_adamw_)


def in_backward() -> bool:
    """Whether autograd is running a backward pass on this thread."""
    return torch._C._current_graph_task_id() != -1


def set_timeout(timeout: timedelta) -> None:
    """Set the timeout of collectives in every existing process group."""
    for group in _process_groups():
        for device in group._device_types:
            backend = group._get_backend(device)
            # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps each backend in one that checks what the ranks do.
            getattr(backend, "wrapped_pg", backend)._set_default_timeout(timeout)


def collectives_begun() -> int:
    """Number of collectives that this rank has started, over all process groups."""
    return sum(group._get_sequence_number_for_group() for group in _process_groups())


@contextmanager
def without_default_group() -> Iterator[None]:
    """Inside, modules are imported as if there were no process group yet.

    Some have functions with the default group as a default argument. A group that exists when they are imported would
    stay alive, with its port and its threads, and be meant when there is another one.
    """
    group, dist.GroupMember.WORLD = dist.GroupMember.WORLD, None
    try:
        yield
    finally:
        dist.GroupMember.WORLD = group


def init_fake_process_group(ranks: int) -> None:
    """Make this process rank 0 of a default group whose other ranks do not exist and whose collectives send nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)


def _process_groups() -> list[dist.ProcessGroup]:
    """All process groups of this process, including those made by libraries."""
    return list(dist.distributed_c10d._world.pg_map)
