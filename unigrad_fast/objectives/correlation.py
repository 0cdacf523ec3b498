"""F, the moving average of the correlation matrix, and where it is kept.

The paper, section "UniGrad": F ← ρ·F + (1−ρ)·B, B this batch's correlation over all ranks; F ← B at first.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from unigrad_fast.kernels import mirror_, round_into_, update_correlation_
from unigrad_fast.kernels.dispatch import use_triton


def require_no_capture(what: str) -> None:
    """Raises RuntimeError while a CUDA graph is captured: what is made then is the graph's, unset until a replay."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"a CUDA graph is captured before the first step with {what}; make one such step first")


class MovingCorrelation(nn.Module):
    """F [C, C] in fp32 (float64 once embeddings are float64), the same on all ranks, part of the state dict.

    Where the product with F is computed in bf16 or fp16, a copy of F in that dtype stands beside it, and on a GPU only
    the upper triangle of both is kept up from step to step. Whoever gets F (by `whole`, the state dict or
    `named_buffers`) gets all of it, as it is then, and may write to it: the copy is made anew before its next use.

    Args:
        width: C.
    """

    correlation: Tensor
    updates: Tensor
    _working: Tensor | None

    def __init__(self, width: int):
        super().__init__()
        self.register_buffer("correlation", torch.zeros(width, width))
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))
        self.register_buffer("_working", None, persistent=False)
        self._is_current = False  # the working copy is F's

    @torch.no_grad()
    def whole(self) -> Tensor:
        """F [C, C], with both triangles."""
        if self._working is not None and use_triton(self.correlation.device):
            mirror_(self.correlation)
        self._is_current = False
        return self.correlation

    def operand(self, like: Tensor, product_dtype: torch.dtype) -> Tensor:
        """What the product u·F multiplies: F or its copy in `product_dtype`, on the device of `like`.

        Args:
            like: unit embeddings; in float64 they make F float64.
            product_dtype: bf16, fp16, or the dtype of F.

        Raises:
            RuntimeError: memory that stays would have to be made while a CUDA graph is captured.
        """
        exact = torch.promote_types(like.dtype, torch.float32)
        with torch.inference_mode(False), torch.no_grad():  # what is made here outlives the call
            if self.correlation.dtype != exact or self.correlation.device != like.device:
                require_no_capture("this dtype and device")
                self.correlation = self.whole().to(like.device, exact)
                self.updates = self.updates.to(like.device)
                self._working = None
            if product_dtype == exact:
                return self.whole()
            if self._working is None or self._working.dtype != product_dtype:
                require_no_capture(f"{product_dtype}")
                self.whole()
                self._working = torch.empty_like(self.correlation, dtype=product_dtype)
            if not self._is_current:
                round_into_(self._working, self.whole())
                self._is_current = True
        return self._working

    def update_(self, unit_MC: Tensor, *, decay: Tensor, count: Tensor, skip: Tensor) -> None:
        """Take in the unit embeddings of all ranks; `updates` is counted by whoever computes the gradient.

        Args:
            unit_MC: [M, C].
            decay: ρ, a scalar on the device; the first batch is taken whole.
            count: M over all ranks, a scalar on the device.
            skip: int32, where one of them is not 0, on any rank, F stays as it is.
        """
        update_correlation_(
            self.correlation,
            unit_MC,
            decay=decay,
            count=count,
            skip=skip,
            updates=self.updates,
            working=self._working if self._is_current else None,
        )

    def named_buffers(self, *arguments, **keywords) -> Iterator[tuple[str, Tensor]]:
        self.whole()
        return super().named_buffers(*arguments, **keywords)

    def _load_from_state_dict(self, *arguments, **keywords) -> None:
        super()._load_from_state_dict(*arguments, **keywords)
        self._is_current = False

    def _save_to_state_dict(self, *arguments, **keywords) -> None:
        self.whole()
        super()._save_to_state_dict(*arguments, **keywords)
