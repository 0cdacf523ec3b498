"""An operator of torch's library `unigrad_fast`, declared once: its implementations, what it writes and returns."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

from .dispatch import needs_dispatcher, on_device_of, takes_triton

OPERATORS = torch.ops.unigrad_fast
_LIBRARY = torch.library.Library("unigrad_fast", "DEF")

P = ParamSpec("P")
R = TypeVar("R")


def takes_first(first: Tensor, *_: Any) -> bool:
    """Whether the Triton kernels support the first argument."""
    return takes_triton(first.device, first.dtype)


class Operator(Generic[P, R]):
    """A function registered with torch as `torch.ops.unigrad_fast.NAME`.

    A direct call bypasses torch's dispatcher when nothing has to observe the operator, and checks no arguments.

    Args:
        name: name in torch's library.
        twin: plain-torch implementation, used on every device if there is no `kernel`; its annotations give the schema.
        kernel: module of this package with a launcher of the twin's name and arguments.
        takes: whether the launcher supports the positional arguments; the first one determines the device.
        writes: arguments that are modified in place.
        fake: called with the arguments by name, returns empty tensors shaped like the results; None: no results.
    """

    def __init__(
        self,
        name: str,
        twin: Callable[P, R],
        *,
        kernel: str | None = None,
        takes: Callable[..., bool] = takes_first,
        writes: Sequence[str] = (),
        fake: Callable[..., Any] | None = None,
    ):
        self.twin, self.kernel, self.takes, self.fake = twin, kernel, takes, fake
        self.compute: Callable[P, R] = twin if kernel is None else self._choose
        _LIBRARY.define(torch.library.infer_schema(twin, op_name=name, mutates_args=writes))
        _LIBRARY.impl(name, self.compute, "CompositeExplicitAutograd")
        torch.library.register_fake(f"unigrad_fast::{name}", self._imagine, lib=_LIBRARY)
        self.registered = getattr(OPERATORS, name)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return (self.registered if needs_dispatcher() else self.compute)(*args, **kwargs)

    def _choose(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if not self.takes(*args):
            return self.twin(*args, **kwargs)
        first: Any = args[0]
        with on_device_of(first if isinstance(first, Tensor) else first[0]):
            return getattr(self._launchers, self.twin.__name__)(*args, **kwargs)

    def _imagine(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        bound = inspect.signature(self.twin).bind(*args, **kwargs)
        bound.apply_defaults()
        return self.fake and self.fake(**bound.arguments)

    @functools.cached_property
    def _launchers(self) -> ModuleType:
        return import_module(f".{self.kernel}", __package__)  # imported lazily: it imports Triton
