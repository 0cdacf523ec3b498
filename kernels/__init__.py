"""UniGrad's arithmetic: unit embeddings, correlation update, gradient. Imports torch, and Triton when on a GPU."""

from .attached_gradient import attach_gradient
from .functional import (
    correlation_product,
    embedding_gradient,
    mirror_,
    unigrad_gradient,
    unit_embeddings,
    update_correlation_,
)
from .reference import effective_rank, round_into_

__all__ = [
    "attach_gradient",
    "correlation_product",
    "effective_rank",
    "embedding_gradient",
    "mirror_",
    "round_into_",
    "unigrad_gradient",
    "unit_embeddings",
    "update_correlation_",
]
