"""The autograd function of a loss whose gradient was computed together with it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


class _KnownGradient(Function):
    @staticmethod
    def forward(ctx, terms: Tensor, gradient_MC: Tensor, *embeddings: Tensor) -> Tensor:
        ctx.dtypes = [embedding.dtype for embedding in embeddings]
        ctx.save_for_backward(gradient_MC)
        # A copy, not a view: views returned by a Function cannot be modified in place, and would share memory.
        return terms[0].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output: Tensor):
        (gradient_MC,) = ctx.saved_tensors
        # Multiply before rounding: a loss scale is there to lift gradients into fp16's range.
        alike = len(set(ctx.dtypes)) == 1
        dtype = ctx.dtypes[0] if alike else gradient_MC.dtype
        scaled_MC = torch.empty_like(gradient_MC, dtype=dtype)
        torch.mul(gradient_MC, grad_output.to(gradient_MC.dtype), out=scaled_MC)
        views = scaled_MC.chunk(len(ctx.dtypes))
        if alike:
            return None, None, *views
        return None, None, *(view.to(dtype) for view, dtype in zip(views, ctx.dtypes, strict=True))


def attach_gradient(terms: Tensor, gradient_MC: Tensor, embeddings: Sequence[Tensor]) -> Tensor:
    """Attach to a loss the gradient that was computed together with it.

    UniGrad's gradient holds F constant, so it is not what autograd would derive from the computation of the loss. It is
    passed to autograd unchanged.

    Args:
        terms: the reported loss, then any further terms, as `unigrad_gradient` returns them.
        gradient_MC: [V·N, C], dloss/dembedding of all views.
        embeddings: V tensors [N, C] that the loss depends on.

    Returns:
        The loss, a scalar with its own memory; its backward gives each embedding its gradient times `grad_output`, in
        the embedding's dtype.
    """
    if not torch.is_grad_enabled() or not any(embedding.requires_grad for embedding in embeddings):
        return terms[0].clone()
    return _KnownGradient.apply(terms, gradient_MC, *embeddings)
