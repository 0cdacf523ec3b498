"""BYOL, SimSiam and DirectPred (the paper, section "Asymmetric Network Methods").

    L = mean of −cos(h(u), m⁺)          h is a network, or W_h from the eigenvectors of F

Shape suffixes: V views, N images of this rank, C embedding width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unigrad_fast.objectives import figures
from unigrad_fast.objectives.checks import require_among
from unigrad_fast.objectives.correlation import MovingCorrelation
from unigrad_fast.objectives.eigen_predictor import EigenPredictor
from unigrad_fast.objectives.originals.original import OriginalLoss, Views, mean, unit
from unigrad_fast.objectives.predictor import Predictor


class BYOL(OriginalLoss, method="byol"):
    """BYOL: a predictor after the online branch.

    Args:
        width: C.
        predictor: True: the objective creates one, and its parameters must be passed to the optimizer; a module
            [·, C] → [·, C]: that module is used; False: `online` already contains predictions.
        settings: `hidden`, the hidden channels of a predictor created here (None is C/4, as in SimSiam); see
            `OriginalLoss`.
    """

    hidden: int | None

    def __init__(self, width: int, predictor: nn.Module | bool = True, **settings: Any):
        super().__init__(width, **settings)
        if not isinstance(predictor, (bool, nn.Module)):
            raise TypeError(f"predictor {predictor!r} is not a module; use True, False or an nn.Module")
        if self.hidden is not None and predictor is not True:
            raise ValueError(f"hidden {self.hidden} needs predictor=True; set that, or leave hidden out")
        own = Predictor(self.width, self.hidden or max(1, self.width // 4)) if predictor is True else None
        self.predictor = predictor if isinstance(predictor, nn.Module) else own

    def predicted(self, online_VNC: Tensor) -> Sequence[Tensor] | Tensor:
        if self.predictor is None:
            return online_VNC
        if isinstance(self.predictor, Predictor):
            return self.predictor(online_VNC, self.process_group)
        return [self.predictor(view_NC) for view_NC in online_VNC]  # one by one: batch statistics are per view

    def loss_of(self, views: Views) -> Tensor:
        return -mean(views.cosine)


class SimSiam(BYOL, method="simsiam"):
    """SimSiam: BYOL with the online branch itself as target, without gradient.

    In the original the predictor's learning rate is constant; the optimizer has to take care of that.
    """


class DirectPred(OriginalLoss, method="byol_directpred"):
    """DirectPred: BYOL with a predictor W_h computed from the eigenvectors of F, a constant in backward.

    The host waits for the eigenvectors.

    Attributes:
        decay: ρ of F.
        epsilon: ε, which lifts small eigenvalues.
        every: number of steps between decompositions.
        kind: "authors": Λ_h = √(Λ/λ_max) + ε, as in the authors' code; "paper": Λ_h = √Λ + ε·λ_max.
    """

    decay: float
    epsilon: float
    every: int
    kind: str

    def __init__(self, width: int, **settings: Any):
        super().__init__(width, **settings)
        require_among("kind", self.kind, ("authors", "paper"))
        self.average, self.direct = MovingCorrelation(self.width), EigenPredictor(self.width)

    @property
    def updates(self) -> Tensor:
        return self.average.updates

    def loss_of(self, views: Views) -> Tensor:
        unit_VNC = views.unit_online
        if self.training:
            batch = self.gather(views.unit_target.detach(), views.raised)
            self.average.take(batch, torch.full_like(batch.count, self.decay), batch.skip[1], unit_VNC.dtype)
            self.average.count(batch.skip[1])
        operand = self.average.operand(unit_VNC, unit_VNC.dtype)
        matrix_CC = self.direct.follow(operand, self.average.updates, self.every, self.kind, self.epsilon)
        predicted_VNC = unit_VNC @ matrix_CC
        if self.measures:
            with torch.no_grad():
                rows = unit_VNC[:2], predicted_VNC[:2], views.unit_positive[:2]
                lift = self.direct.lift(self.kind, self.epsilon, unit_VNC)
                views.sums |= figures.of_predictor(*rows, matrix_CC, lift)
        return -mean(torch.linalg.vecdot(unit(predicted_VNC), views.unit_positive))
