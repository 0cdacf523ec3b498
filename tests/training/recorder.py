"""What a CUDA graph does, on the CPU: operators are recorded with their very tensors, and run again in their places.

Numbers that Python passed to an operator stay as they were, and memory that was made while recording is where it was:
what the host has decided, counted or remembered does not happen again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Result = TypeVar("Result")

# The host may read values on the CPU, to refuse some; on a GPU the same branches do not read them.
READS = {"aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero"}


def tensors_of(tree: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class Recording(TorchDispatchMode):
    """Notes what is dispatched while it is entered; then everything that was there before is put back.

    A replay computes in the order of the recording. What an operator returned in memory of its own is written there
    again; views and operands that it changed lie where they lay.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple] = []
        self.made: dict[int, Tensor] = {}  # storages of the recording, by a tensor that keeps each
        self.found: dict[int, tuple[Tensor, Tensor]] = {}  # others that it touched, and what was in them

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = tensors_of((args, kwargs))
        for tensor in given:
            if key(tensor) not in self.made and key(tensor) not in self.found:
                every = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
                self.found[key(tensor)] = tensor, every.clone()
        result = operator(*args, **kwargs)
        name = operator._schema.name
        own = [t for t in tensors_of(result) if key(t) not in {key(each) for each in given}]
        for tensor in own:
            self.made.setdefault(key(tensor), tensor)
        if name not in READS and "empty" not in name and not name.startswith("profiler::"):
            self.calls.append((operator, args, kwargs, result))
        return result

    def finish(self) -> None:
        """Put back what was there, and leave garbage in what was made, as memory is when a graph was captured."""
        for tensor, before in self.found.values():
            torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).copy_(before)
        for tensor in self.made.values():
            torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).fill_(0xFF)  # NaN in every floating dtype
        self.found.clear()

    @torch.no_grad()
    def replay(self) -> None:
        for operator, args, kwargs, before in self.calls:
            result = operator(*args, **kwargs)
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.ScriptObject):  # a collective's
                    dist.Work.unbox(leaf).wait()
            given = {key(each) for each in tensors_of((args, kwargs))}
            for was, now in zip(tensors_of(before), tensors_of(result), strict=True):
                if key(was) not in given:
                    was.copy_(now)


def record(compute: Callable[[], Result]) -> tuple[Result, Callable[[], None]]:
    """In place of `step_graph.record_on_cuda`."""
    recording = Recording()
    with recording:
        result = compute()
    recording.finish()
    return result, recording.replay
