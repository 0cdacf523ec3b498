"""F, the moving average of the correlation matrix, as every rank has it; in shards it is `sharded_correlation`'s.

The paper, section "UniGrad": F ← ρ·F + (1−ρ)·B, B this batch's correlation over all ranks; F ← B at first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unigrad_fast.kernels import effective_rank, mirror_, ops, round_into_
from unigrad_fast.objectives.state import moved
from unigrad_fast.objectives.surroundings import require_no_capture

STATE = ("correlation", "updates")


class MovingCorrelation(nn.Module):
    """F [C, C] in fp32 (float64 once embeddings are float64), the same on all ranks, part of the state dict.

    F and `updates` are state but neither parameters nor buffers: what sends, averages or converts a model's buffers
    (DDP, `AveragedModel`, `half`) leaves them alone. They follow the module from device to device, never to a dtype.

    Where the product with F is computed in bf16 or fp16, a copy of F in that dtype stands beside it, which has three
    states, the same on every device:

      - none: F is whole, and the product reads F.
      - current: it is F, rounded. Updates move both, and only their upper triangles are sure to be kept up.
      - outdated: it has to be made anew before its next use, since somebody was given F or has written to it.

    Whoever reads F (`whole`, the state dict, a copy, a move) gets all of it, as it is then: it is repaired first. He
    may write to it, at once or later.

    Args:
        width: C.
        rows: how many rows of F lie here, from `first_row` on; None is all.
    """

    first_row = 0
    correlation: Tensor
    updates: Tensor
    _working: Tensor | None
    _is_current: bool
    _version: int  # of F when the copy was last current

    def __init__(self, width: int, rows: int | None = None):
        super().__init__()
        with torch.inference_mode(False):
            matrix = torch.zeros(width if rows is None else rows, width, dtype=torch.float32)
            self._take(matrix, torch.zeros((), dtype=torch.int64))

    @property
    def nbytes(self) -> int:
        """Bytes of F and of its copy, as far as they lie here."""
        return self.correlation.nbytes + (0 if self._working is None else self._working.nbytes)

    @torch.no_grad()
    def whole(self) -> Tensor:
        """F [C, C], with both triangles, or those of its rows that lie here, to be read and written."""
        self._repair()
        self._is_current = False
        return self.correlation

    def operand(self, like: Tensor, product_dtype: torch.dtype) -> Tensor:
        """What the product u·F multiplies: F or its copy in `product_dtype`, on the device of `like`.

        In training mode F itself goes to that device and, for float64, to that dtype; else it stays as it is.

        Args:
            like: unit embeddings; in float64 they make F float64.
            product_dtype: bf16, fp16, or the dtype of F.

        Raises:
            RuntimeError: memory that stays would have to be made while a CUDA graph is captured; F has no values.
        """
        working, exact = self._working, torch.promote_types(like.dtype, torch.float32)
        is_in_use = self.correlation.dtype == exact and self.correlation.device == like.device
        if is_in_use and working is not None and working.dtype == product_dtype and self._copy_is_current():
            return working
        if not self.training and not is_in_use:
            self._require_values()
            return self.whole().to(like.device, product_dtype)
        with torch.inference_mode(False), torch.no_grad():  # what is made here outlives the call
            if self.correlation.dtype != exact or self.correlation.device != like.device:
                require_no_capture("this dtype and device")
                self._require_values()
                self._repair()
                self._take(self.correlation.to(like.device, exact), self.updates.to(like.device))
            if product_dtype == exact:
                return self.whole()
            if self._working is None or self._working.dtype != product_dtype:
                require_no_capture(f"{product_dtype}")
                self.whole()
                self._working = torch.empty_like(self.correlation, dtype=product_dtype)
            if not self._copy_is_current():
                self._repair()
                round_into_(self._working, self.correlation)
                self._set_current()
        return self._working

    def make_current(self) -> None:
        """Before a CUDA graph of a step is captured, so that it holds no repair: F and its copy move together then."""
        if self._working is not None:
            self.operand(self.correlation, self._working.dtype)

    def update_(self, unit_MC: Tensor, *, decay: Tensor, count: Tensor, skip: Tensor) -> None:
        """Take in the unit embeddings of all ranks; `updates` is counted by whoever computes the gradient.

        Args:
            unit_MC: [M, C].
            decay: ρ, a scalar on the device; the first batch is taken whole.
            count: M over all ranks, a scalar on the device.
            skip: int32, where one of them is not 0, on any rank, F stays as it is.
        """
        ops.update_correlation_(
            self.correlation,
            unit_MC,
            decay=decay,
            count=count,
            skip=skip,
            updates=self.updates,
            first_row=self.first_row,
            working=self._working if self._is_current else None,
        )
        if self._is_current:
            self._set_current()

    @torch.no_grad()
    def accept(self) -> None:
        """After F was written to from rows that were shards: they are symmetric to rounding, a whole F to the bit."""
        if self.correlation.shape[0] == self.correlation.shape[1]:
            mirror_(self.whole())

    @torch.no_grad()
    def effective_rank(self, group: dist.ProcessGroup | None) -> Tensor:
        """See `UniGrad.effective_rank`."""
        return effective_rank(self.whole())

    def gather(self, group: dist.ProcessGroup | None) -> Tensor:
        """All of F on this rank; where it lies in shards all ranks call it together."""
        return self.whole()

    def _repair(self) -> None:
        # A replayed CUDA graph moves F without a word, so that with a copy no repair is the last.
        if self._working is not None:
            is_current = self._copy_is_current()
            if self.correlation.shape[0] == self.correlation.shape[1]:
                mirror_(self.correlation)
            if is_current:
                self._set_current()

    def _copy_is_current(self) -> bool:
        # What writes to F raises its version; compiled code cannot ask for it.
        return self._is_current and (torch.compiler.is_compiling() or self._version == self.correlation._version)

    def _set_current(self) -> None:
        self._is_current = True
        if not torch.compiler.is_compiling():
            self._version = self.correlation._version

    def _take(self, correlation_CC: Tensor, updates: Tensor) -> None:
        """Have another F, whole and without a copy."""
        self.correlation, self.updates = correlation_CC, updates
        self._working, self._is_current, self._version = None, False, 0

    def _require_values(self) -> None:
        if self.correlation.is_meta:
            raise RuntimeError(
                "the correlation is on the meta device and has no values; before the first batch call "
                "to_empty(device=...), with which it begins at 0, or load_state_dict(..., assign=True)"
            )

    @torch.no_grad()
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> MovingCorrelation:
        self.whole()
        with torch.inference_mode(False):
            correlation_CC, updates = (moved(tensor, fn) for tensor in (self.correlation, self.updates))
            if self.correlation.is_meta and not correlation_CC.is_meta:
                correlation_CC, updates = correlation_CC.zero_(), updates.zero_()
            if correlation_CC is not self.correlation or updates is not self.updates:
                self._take(correlation_CC, updates)
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        self.whole()
        return {**self.__dict__, "_working": None}

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        self.whole()
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in STATE:
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
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, False, missing_keys, unexpected_keys, error_msgs
        )
        names = {prefix + name: name for name in STATE}
        if strict:
            missing_keys += [key for key in names if key not in state_dict]
            unexpected_keys += [key for key in state_dict if key.startswith(prefix) and key not in names]
        found = {name: state_dict[key].detach() for key, name in names.items() if key in state_dict}
        for name, tensor in found.items():
            if tensor.shape != getattr(self, name).shape:
                given, own = list(tensor.shape), list(getattr(self, name).shape)
                error_msgs.append(f"{prefix}{name} is {given} in the state dict and {own} here")
                return
        self.whole()
        with torch.inference_mode(False):
            correlation, updates = (found.get(name, getattr(self, name)) for name in STATE)
            exact = torch.promote_types(correlation.dtype, torch.float32)
            if local_metadata.get("assign_to_params_buffers", False):
                self._take(correlation.to(exact), updates)
            elif self.correlation.is_meta:
                self._take(correlation.to(exact, copy=True), updates.clone())
            elif exact != self.correlation.dtype:
                self._take(correlation.to(self.correlation.device, exact, copy=True), self.updates.copy_(updates))
            else:
                self.correlation.copy_(correlation)
                self.updates.copy_(updates)
