"""F, the moving average of the correlation matrix, as every rank has it; in shards it is `sharded_correlation`'s.

The paper, section "UniGrad": F ← ρ·F + (1−ρ)·B, B this batch's correlation over all ranks; F ← B at first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unigrad_fast.kernels import effective_rank, mirror_, ops, round_into_
from unigrad_fast.objectives.over_ranks import Gathered, OwnRows
from unigrad_fast.objectives.state import KeptState
from unigrad_fast.objectives.surroundings import require_no_capture

Gradient = Callable[..., tuple[Tensor, Tensor]]


class MovingCorrelation(KeptState):
    """F [C, C] in fp32 (float64 once embeddings are float64), the same on all ranks; kept state, as is `updates`.

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

    kept = ("correlation", "updates")
    rank, shards, first_row = 0, 1, 0
    correlation: Tensor
    updates: Tensor
    _working: Tensor | None
    _is_current: bool
    _version: int  # of F when the copy was last current

    def __init__(self, width: int, rows: int | None = None):
        super().__init__()
        with torch.inference_mode(False):
            matrix = torch.zeros(width if rows is None else rows, width, dtype=torch.float32)
            self._become(matrix, torch.zeros((), dtype=torch.int64))

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
        if is_in_use and product_dtype == exact:
            return self.whole()
        if not self.training and not is_in_use:
            self._require_values()
            return self.whole().to(like.device, product_dtype)
        with torch.inference_mode(False), torch.no_grad():  # what is made here outlives the call
            if not is_in_use:
                require_no_capture("this dtype and device")
                self._require_values()
                self._repair()
                self._become(self.correlation.to(like.device, exact), self.updates.to(like.device))
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

    def take(self, batch: Gathered, decay: Tensor, skip: Tensor, product_dtype: torch.dtype) -> None:
        """F ← ρ·F + (1−ρ)·B, and of the first batch F ← B; UniGrad's gradient counts it, or `count`.

        Args:
            batch: unit embeddings of all ranks.
            decay: ρ, a scalar on the device.
            skip: of the batch's, that of F's source; where it is not 0 F stays as it is.
            product_dtype: of the product that follows, see `operand`; the copy moves with F.
        """
        rows, count = batch.rows, batch.count
        if not rows.shape[-2]:
            return
        self.operand(rows, product_dtype)
        if rows.dim() == 3:
            rows, count = rows.flatten(0, 1), len(rows) * count
        ops.update_correlation_(
            self.correlation,
            rows,
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
    def count(self, skip: Tensor) -> None:
        """After `take`, where no kernel of UniGrad's gradient counts the batch."""
        self.updates.add_(skip == 0)

    def product(self, unit_MC: Tensor, product_dtype: torch.dtype) -> Tensor:
        """u·F, or its columns that belong to the rows that lie here; see `operand`."""
        return ops.correlation_product(unit_MC, self.operand(unit_MC, product_dtype))

    def gradient_of(self, online: OwnRows, product_dtype: torch.dtype, kernels: Any) -> Gradient:
        """`unigrad_gradient` of these rows but for `correlation`, which it has; in shards after their collectives.

        Args:
            online: unit embeddings of the online branch.
            kernels: `functional`, or `ops` where the rows were looked at before.
        """
        return partial(kernels.unigrad_gradient, correlation=self.operand(online.rows, product_dtype))

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

    def _become(self, correlation_CC: Tensor, updates: Tensor) -> None:
        """Have another F, whole and without a copy."""
        self.correlation, self.updates = correlation_CC, updates
        self._working, self._is_current, self._version = None, False, 0

    @contextmanager
    def _repaired(self) -> Iterator[None]:
        """While inside, others read F and write to it, or give it other memory; then the copy is dropped."""
        before = self.whole()
        yield
        if self.correlation is not before:
            self._working = None

    def _require_values(self) -> None:
        if self.correlation.is_meta:
            raise RuntimeError(
                "the correlation is on the meta device and has no values; before the first batch call "
                "to_empty(device=...), with which it begins at 0, or load_state_dict(..., assign=True)"
            )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> MovingCorrelation:
        with self._repaired():
            super()._apply(fn, recurse)
        return self

    def __getstate__(self) -> dict[str, Any]:
        self.whole()
        return {**self.__dict__, "_working": None}

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        self.whole()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        state, key = dict(state_dict), prefix + "correlation"
        if key in state:
            state[key] = state[key].to(torch.promote_types(state[key].dtype, torch.float32))
        with self._repaired():
            super()._load_from_state_dict(state, prefix, *arguments)
