"""The autograd function: a loss whose gradient is already known."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


class _KnownGradient(Function):
    @staticmethod
    def forward(ctx, loss: Tensor, views: int, *tensors: Tensor) -> Tensor:
        embeddings, gradients = tensors[:views], tensors[views:]
        ctx.dtypes = [embedding.dtype for embedding in embeddings]
        ctx.save_for_backward(*gradients)
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output: Tensor):
        scaled = [
            (grad_output * gradient).to(dtype) for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return None, None, *scaled, *(None for _ in scaled)


def attach_gradient(loss: Tensor, embeddings: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
    """Give a loss the gradients that were computed with it.

    UniGrad's gradient holds F constant and is not the derivative of a program that happens to compute the loss,
    so it is handed to autograd as it is.

    Args:
        loss: scalar, the value that is reported.
        embeddings: V tensors [N, C] that the loss depends on.
        gradients: V tensors [N, C], dloss/dembedding.

    Returns:
        The loss; its backward gives each embedding its gradient times `grad_output`, in the embedding's dtype.
    """
    return _KnownGradient.apply(loss, len(embeddings), *embeddings, *gradients)
