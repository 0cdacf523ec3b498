"""The arithmetic of UniGrad: unit embeddings, correlation update, gradient. Imports torch only."""

from .ops import attach_gradient
from .reference import effective_rank, unigrad_gradient, unit_embeddings, update_correlation_

__all__ = ["attach_gradient", "effective_rank", "unigrad_gradient", "unit_embeddings", "update_correlation_"]
