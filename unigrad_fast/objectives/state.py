"""Tensors that are an objective's state: part of its state dict, but neither parameters nor buffers.

Every rank computes the same values by itself. Code that broadcasts, averages or converts a model's buffers (DDP,
`AveragedModel`, `half`) does not touch them; they move with the module between devices but keep their dtype.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

Kept = TypeVar("Kept", bound="KeptState")


class KeptState(nn.Module):
    """A module whose `kept` tensors are state.

    Loading a state dict keeps the dtype of its tensors, so that a resumed run is the same bit for bit, and loads either
    all of them or none.

    Attributes:
        kept: names of the state tensors.
    """

    kept: tuple[str, ...] = ()

    def ready(self: Kept, like: Tensor) -> Kept:
        """The state on the device and, as far as it is floating, in the dtype of `like`.

        In evaluation mode it is a converted copy, if one is needed.
        """
        own = [getattr(self, name) for name in self.kept]
        with torch.inference_mode(False), torch.no_grad():
            there = [each.to(like if each.is_floating_point() else like.device) for each in own]
        if all(one is other for one, other in zip(own, there, strict=True)):
            return self
        state = self if self.training else copy.copy(self)
        for name, tensor in zip(self.kept, there, strict=True):
            setattr(state, name, tensor)
        return state

    @torch.no_grad()
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> KeptState:
        with torch.inference_mode(False):
            for name in self.kept:
                tensor = getattr(self, name)
                there = moved(tensor, fn)
                setattr(self, name, there.zero_() if tensor.is_meta and not there.is_meta else there)
        return super()._apply(fn, recurse)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in self.kept:
            destination[prefix + name] = getattr(self, name)

    @torch.no_grad()
    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        names = {prefix + name: name for name in self.kept}
        others = {key: value for key, value in state_dict.items() if key not in names}
        super()._load_from_state_dict(others, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        if strict:
            missing_keys += [key for key in names if key not in state_dict]
        found = {name: state_dict[key].detach() for key, name in names.items() if key in state_dict}
        misfits = [
            f"{prefix}{name} is {list(tensor.shape)} in the state dict and {list(getattr(self, name).shape)} here"
            for name, tensor in found.items()
            if tensor.shape != getattr(self, name).shape
        ]
        if misfits:
            error_msgs += misfits
            return
        assigned = local_metadata.get("assign_to_params_buffers", False)
        with torch.inference_mode(False):
            for name, tensor in found.items():
                own = getattr(self, name)
                if assigned or own.is_meta:
                    setattr(self, name, tensor if assigned else tensor.clone())
                elif tensor.dtype == own.dtype:
                    own.copy_(tensor)
                else:
                    setattr(self, name, tensor.to(own.device, copy=True))


def moved(tensor: Tensor, fn: Callable[[Tensor], Tensor]) -> Tensor:
    """The tensor on the device to which `fn`, which moves or converts a module's tensors, moves it; dtype unchanged."""
    # `fn` gets the bits as integers, which such functions do not convert; if one does, only its device is used.
    bits = tensor.view({8: torch.int64, 4: torch.int32, 2: torch.int16}[tensor.element_size()])
    there = fn(bits)
    if there is bits:
        return tensor
    return there.view(tensor.dtype) if there.dtype == bits.dtype else tensor.to(there.device)
