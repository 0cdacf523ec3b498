"""A short `repr` for dataclasses that hold tensors."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from typing import Any

import torch


class Shortened:
    """Base of a dataclass (`repr=False`): a tensor is printed as its number if it is a scalar, else as dtype and shape.

    Printing reads scalars, so on a GPU it waits for them.
    """

    def __repr__(self) -> str:
        values = ", ".join(f"{field.name}={_shortened(getattr(self, field.name))}" for field in fields(self))
        return f"{type(self).__name__}({values})"


def _shortened(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        if value.dim() == 0:
            with suppress(RuntimeError):  # a tensor without content, as inside torch.compile, has no number
                return f"{value.item():g}"
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {_shortened(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_shortened, value)) + "]"
    return repr(value)
