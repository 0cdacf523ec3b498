"""DirectPred's predictor: W_h = U·Λ_h·Uᵀ of the eigenvectors U of F (the paper, Eq. of W_h)."""

from __future__ import annotations

import torch
from torch import Tensor

from unigrad_fast.objectives.state import KeptState

SMALLEST = 1e-4  # of Λ_h in the authors' code


class EigenPredictor(KeptState):
    """W_h, symmetric and the same on all ranks, and the largest eigenvalue that it was made with.

    Args:
        width: C.

    Attributes:
        matrix: W_h, [C, C].
        largest: λ_max, a scalar.
    """

    kept = ("matrix", "largest")
    matrix: Tensor
    largest: Tensor

    def __init__(self, width: int):
        super().__init__()
        with torch.inference_mode(False):
            self.matrix, self.largest = torch.zeros(width, width), torch.zeros(())

    @torch.no_grad()
    def follow(self, correlation_CC: Tensor, updates: Tensor, every: int, kind: str, epsilon: float) -> Tensor:
        """W_h, made anew in every `every`-th training step; the host waits.

        Args:
            correlation_CC: F; its dtype is that of the decomposition.
            updates: batches that F has taken, this one included.
            every: steps from one decomposition to the next.
            kind: "authors": Λ_h = √(Λ/λ_max) + ε, 1e-4 at least; else √Λ + ε·λ_max.
            epsilon: ε.
        """
        if not self.training:
            return self.matrix.to(correlation_CC)
        if (int(updates) - 1) % every == 0:
            self.matrix, self.largest = decomposed(correlation_CC, kind, epsilon)
        elif self.matrix.dtype != correlation_CC.dtype or self.matrix.device != correlation_CC.device:
            self.matrix, self.largest = self.matrix.to(correlation_CC), self.largest.to(correlation_CC)
        return self.matrix

    def coefficients(self, kind: str, epsilon: float, like: Tensor) -> tuple[Tensor | float, Tensor | float]:
        """a and b of G = W_h² − a·W_h + b·I, which stands for F in the gradient, of the F that W_h was made of.

        With e the ε·λ_max that W_h = F^½ + e·I was lifted by, G = F + e²·I = (W_h − e·I)² + e²·I; in the authors' code
        it is F/λ_max + ε²·I, and nothing is dropped of G = W_h² ("full"). They are where `like` is, in its dtype.
        """
        if kind == "full":
            return 0.0, 0.0
        lift = epsilon if kind == "authors" else epsilon * self.largest.to(like)
        return 2 * lift, 2 * lift**2


def decomposed(correlation_CC: Tensor, kind: str, epsilon: float) -> tuple[Tensor, Tensor]:
    """W_h and λ_max of F."""
    value_C, vector_CC = torch.linalg.eigh(correlation_CC)
    value_C = value_C.clamp_min(0)
    largest = value_C.amax()
    if kind == "authors":
        root_C = (value_C / largest.clamp_min(torch.finfo(largest.dtype).tiny)).sqrt()
        lifted_C = (root_C + epsilon).clamp_min(SMALLEST)
    else:
        lifted_C = value_C.sqrt() + epsilon * largest
    return (vector_CC * lifted_C) @ vector_CC.T, largest
