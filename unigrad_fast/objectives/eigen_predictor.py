"""DirectPred's predictor: W_h = U·Λ_h·Uᵀ with U the eigenvectors of F (the paper's equation for W_h)."""

from __future__ import annotations

import torch
from torch import Tensor

from unigrad_fast.objectives.state import KeptState

SMALLEST = 1e-4  # lower bound of Λ_h in the authors' code


class EigenPredictor(KeptState):
    """W_h, symmetric and the same on all ranks, and the largest eigenvalue of the F it was computed from.

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
        """W_h, recomputed in every `every`-th training step; the host waits for the GPU.

        Args:
            correlation_CC: F; the decomposition is computed in its dtype.
            updates: number of batches F was updated with, including this one.
            every: number of steps between decompositions.
            kind: "authors": Λ_h = √(Λ/λ_max) + ε, at least 1e-4; otherwise √Λ + ε·λ_max.
            epsilon: ε.
        """
        if not self.training:
            return self.matrix.to(correlation_CC)
        if (int(updates) - 1) % every == 0:
            self.matrix, self.largest = decomposed(correlation_CC, kind, epsilon)
        elif self.matrix.dtype != correlation_CC.dtype or self.matrix.device != correlation_CC.device:
            self.matrix, self.largest = self.matrix.to(correlation_CC), self.largest.to(correlation_CC)
        return self.matrix

    def lift(self, kind: str, epsilon: float, like: Tensor) -> Tensor | float:
        """e in W_h = F^½ + e·I, with the device and dtype of `like`; in the authors' code F/λ_max takes F's place."""
        return epsilon if kind == "authors" else epsilon * self.largest.to(like)

    def coefficients(self, kind: str, epsilon: float, like: Tensor) -> tuple[Tensor | float, Tensor | float]:
        """The coefficients a and b of G = W_h² − a·W_h + b·I, which takes the place of F in the gradient.

        F here is the one that W_h was computed from. With W_h = F^½ + e·I and e = ε·λ_max, G = F + e²·I =
        (W_h − e·I)² + e²·I. In the authors' code G = F/λ_max + ε²·I. With "full", G = W_h² without approximation. The
        coefficients have the device and dtype of `like`.
        """
        if kind == "full":
            return 0.0, 0.0
        lift = self.lift(kind, epsilon, like)
        return 2 * lift, 2 * lift**2


def decomposed(correlation_CC: Tensor, kind: str, epsilon: float) -> tuple[Tensor, Tensor]:
    """W_h computed from F, and F's largest eigenvalue λ_max."""
    value_C, vector_CC = torch.linalg.eigh(correlation_CC)
    value_C = value_C.clamp_min(0)
    largest = value_C.amax()
    if kind == "authors":
        root_C = (value_C / largest.clamp_min(torch.finfo(largest.dtype).tiny)).sqrt()
        lifted_C = (root_C + epsilon).clamp_min(SMALLEST)
    else:
        lifted_C = value_C.sqrt() + epsilon * largest
    return (vector_CC * lifted_C) @ vector_CC.T, largest
