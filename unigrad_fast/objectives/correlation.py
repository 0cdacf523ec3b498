"""F, the moving average of the correlation matrix, whole on every rank; `sharded_correlation` has the sharded one.

The paper, section "UniGrad": F ← ρ·F + (1−ρ)·B, with B the batch's correlation over all ranks; the first time F ← B.
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
    """F [C, C] in fp32 (float64 once embeddings are float64), the same on all ranks; F and `updates` are kept state.

    If the product with F is computed in bf16 or fp16, the module also keeps a working copy of F in that dtype. The
    working copy has one of three states, the same on every device:

      - none: both triangles of F are up to date, and the product reads F.
      - current: the copy equals F, rounded. An update writes both; only their upper triangles are kept up to date.
      - outdated: F was handed out or written to, so the copy must be rebuilt before its next use.

    Every reader of F (`whole`, the state dict, a copy, a move) gets both triangles up to date: F is repaired first.
    The reader may write to F, immediately or later.

    Args:
        width: C.
        rows: number of rows of F held here, starting at `first_row`; None is all.
    """

    kept = ("correlation", "updates")
    rank, shards, first_row = 0, 1, 0
    correlation: Tensor
    updates: Tensor
    _working: Tensor | None
    _is_current: bool
    _version: int  # version counter of F when the copy was last current

    def __init__(self, width: int, rows: int | None = None):
        super().__init__()
        with torch.inference_mode(False):
            matrix = torch.zeros(width if rows is None else rows, width, dtype=torch.float32)
            self._become(matrix, torch.zeros((), dtype=torch.int64))

    @property
    def nbytes(self) -> int:
        """Bytes of F and of its working copy on this rank."""
        return self.correlation.nbytes + (0 if self._working is None else self._working.nbytes)

    @torch.no_grad()
    def whole(self) -> Tensor:
        """F [C, C] with both triangles, or this rank's rows of it; the caller may read it and write to it."""
        self._repair()
        self._is_current = False
        return self.correlation

    def operand(self, like: Tensor, product_dtype: torch.dtype) -> Tensor:
        """The matrix for the product u·F: F or its copy in `product_dtype`, on the device of `like`.

        In training mode F itself moves to that device and, for float64, to that dtype; in evaluation mode it does not.

        Args:
            like: unit embeddings; in float64 they make F float64.
            product_dtype: bf16, fp16, or the dtype of F.

        Raises:
            RuntimeError: persistent memory would be allocated while a CUDA graph is captured, or F is on the meta
                device.
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
        with torch.inference_mode(False), torch.no_grad():  # tensors made here outlive the call
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
        """Bring the working copy up to date before a CUDA graph is captured, so that the graph contains no repair."""
        if self._working is not None:
            self.operand(self.correlation, self._working.dtype)

    def take(self, batch: Gathered, decay: Tensor, skip: Tensor, product_dtype: torch.dtype) -> None:
        """Update F with a batch: F ← ρ·F + (1−ρ)·B, for the first batch F ← B.

        `updates` is not incremented here: UniGrad's gradient kernel does it, or `count`.

        Args:
            batch: unit embeddings of all ranks.
            decay: ρ, a scalar on the device.
            skip: the flag of the branch that F is computed from; if it is not 0, F stays unchanged.
            product_dtype: dtype of the product that follows, see `operand`; the copy is updated together with F.
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
        """Increment `updates` after `take`, if no kernel of UniGrad's gradient does."""
        self.updates.add_(skip == 0)

    def product(self, unit_MC: Tensor, product_dtype: torch.dtype) -> Tensor:
        """u·F, or only the columns that belong to this rank's rows of F; see `operand`."""
        return ops.correlation_product(unit_MC, self.operand(unit_MC, product_dtype))

    def gradient_of(self, online: OwnRows, product_dtype: torch.dtype, kernels: Any) -> Gradient:
        """`unigrad_gradient` with `correlation` already bound; a sharded F runs its collectives first.

        Args:
            online: unit embeddings of the online branch.
            kernels: `functional`, or `ops` if batches like this one have been checked before.
        """
        return partial(kernels.unigrad_gradient, correlation=self.operand(online.rows, product_dtype))

    @torch.no_grad()
    def accept(self) -> None:
        """Make F symmetric bit for bit after it was filled from shards, which are symmetric only up to rounding."""
        if self.correlation.shape[0] == self.correlation.shape[1]:
            mirror_(self.whole())

    @torch.no_grad()
    def effective_rank(self, group: dist.ProcessGroup | None) -> Tensor:
        """See `UniGrad.effective_rank`."""
        return effective_rank(self.whole())

    def gather(self, group: dist.ProcessGroup | None) -> Tensor:
        """All of F on this rank; if F is sharded, all ranks must call this together."""
        return self.whole()

    def _repair(self) -> None:
        # A replayed CUDA graph updates F unnoticed, so as long as there is a copy, F is repaired at every read.
        if self._working is not None:
            is_current = self._copy_is_current()
            if self.correlation.shape[0] == self.correlation.shape[1]:
                mirror_(self.correlation)
            if is_current:
                self._set_current()

    def _copy_is_current(self) -> bool:
        # Every write to F increments its version counter; compiled code cannot read that counter.
        return self._is_current and (torch.compiler.is_compiling() or self._version == self.correlation._version)

    def _set_current(self) -> None:
        self._is_current = True
        if not torch.compiler.is_compiling():
            self._version = self.correlation._version

    def _become(self, correlation_CC: Tensor, updates: Tensor) -> None:
        """Replace F by another matrix with both triangles, and drop the copy."""
        self.correlation, self.updates = correlation_CC, updates
        self._working, self._is_current, self._version = None, False, 0

    @contextmanager
    def _repaired(self) -> Iterator[None]:
        """Inside, F may be read, written or moved to other memory; the copy is dropped if the memory changed."""
        before = self.whole()
        yield
        if self.correlation is not before:
            self._working = None

    def _require_values(self) -> None:
        if self.correlation.is_meta:
            raise RuntimeError(
                "the correlation is on the meta device and has no values; before the first batch call "
                "to_empty(device=...), which sets it to 0, or load_state_dict(..., assign=True)"
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
