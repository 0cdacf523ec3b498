"""Persistent and transient memory of fake tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping

from torch import Tensor

from unigrad_fast.dry_run.walked import TRANSIENT
from unigrad_fast.runtime.torch_private import tree_leaves


class Memory:
    """Transient bytes in use: now, at their peak, and by kind at the peak of each phase."""

    def __init__(self, persistent: Mapping[str, list[Tensor]]):
        self.now = self.most = 0
        self.fullest: dict[str, dict[str, int]] = {}
        self._known = {key_of(t) for tensors in persistent.values() for t in tensors}
        self._kinds: dict[int, str] = {}
        self._by_kind = dict.fromkeys(TRANSIENT, 0)
        self._most_of: dict[str, int] = {}

    def take(self, result: object, kind_of: Callable[[Tensor], str], phase: str) -> None:
        """Count an operator's results."""
        for tensor in tree_leaves(result):
            if not isinstance(tensor, Tensor):
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self._known:
                continue
            self._known.add(key)
            self.now += storage.nbytes()
            self.most = max(self.most, self.now)
            kind = self._kinds[key] = kind_of(tensor)
            self._by_kind[kind] += storage.nbytes()
            if self.now > self._most_of.get(phase, 0):
                self._most_of[phase] = self.now
                self.fullest[phase] = dict(self._by_kind)
            weakref.finalize(storage, self._give_back, key, storage.nbytes())

    def kind(self, tensor: Tensor) -> str | None:
        """The kind of a tensor's memory; None if it is persistent."""
        return self._kinds.get(key_of(tensor))

    def name(self, tensor: object, kind: str) -> None:
        """Change the kind of memory in use, once it is known."""
        if not isinstance(tensor, Tensor) or (key := key_of(tensor)) not in self._kinds:
            return
        size = tensor.untyped_storage().nbytes()
        self._by_kind[self._kinds[key]] -= size
        self._by_kind[kind] += size
        self._kinds[key] = kind

    def _give_back(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size
        self._by_kind[self._kinds.pop(key)] -= size


def stored(tensors: list[Tensor]) -> int:
    """Bytes of the tensors' storages, counting a shared storage once."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def key_of(tensor: Tensor) -> int:
    """Identifies a tensor's storage."""
    return tensor.untyped_storage()._cdata
