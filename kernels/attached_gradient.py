"""The autograd function of a loss whose gradient was computed with it."""

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
        # Not a view: those of a function cannot be worked on in place, and what was done to one is done to all.
        return terms[0].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output: Tensor):
        (gradient_MC,) = ctx.saved_tensors
        # Multiplied before it is rounded: a scale of the loss is there to lift gradients into fp16's range.
        alike = len(set(ctx.dtypes)) == 1
        dtype = ctx.dtypes[0] if alike else gradient_MC.dtype
        scaled_MC = torch.empty_like(gradient_MC, dtype=dtype)
        torch.mul(gradient_MC, grad_output.to(gradient_MC.dtype), out=scaled_MC)
        views = scaled_MC.chunk(len(ctx.dtypes))
        if alike:
            return None, None, *views
        return None, None, *(view.to(dtype) for view, dtype in zip(views, ctx.dtypes, strict=True))


def attach_gradient(terms: Tensor, gradient_MC: Tensor, embeddings: Sequence[Tensor]) -> Tensor:
    """Give a loss the gradient that was computed with it.

    UniGrad's gradient holds F constant and is not the derivative of a program that happens to compute the loss,
    so it is handed to autograd as it is.

    Args:
        terms: the loss that is reported, and whatever else, as `unigrad_gradient` returns them.
        gradient_MC: [V·N, C], dloss/dembedding of all views.
        embeddings: V tensors [N, C] that the loss depends on.

    Returns:
        The loss, a scalar in memory of its own; its backward gives each embedding its gradient times `grad_output`, in
        its dtype.
    """
    if not torch.is_grad_enabled() or not any(embedding.requires_grad for embedding in embeddings):
        return terms[0].clone()
    return _KnownGradient.apply(terms, gradient_MC, *embeddings)
