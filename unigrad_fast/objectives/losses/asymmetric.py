"""BYOL, SimSiam and DirectPred (the paper, section "Asymmetric Network Methods").

    L = mean of −cos(h(u), m⁺)          h a network, or W_h of the eigenvectors of F

Shape suffixes: V views, N images of this rank, C embedding width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unigrad_fast.objectives.checks import require_number, require_whole
from unigrad_fast.objectives.correlation import MovingCorrelation
from unigrad_fast.objectives.eigen_predictor import EigenPredictor
from unigrad_fast.objectives.losses.loss import OriginalLoss, Views, mean, unit
from unigrad_fast.objectives.predictor import Predictor


class BYOL(OriginalLoss):
    """BYOL: a predictor after the online branch.

    Args:
        width: C.
        predictor: True: the objective has one of its own, whose parameters are to be given to the optimizer; a module
            [·, C] → [·, C]: that one; False: `online` are predictions already.
        hidden: channels inside a predictor of its own; None is C/4, as SimSiam's.
        target, process_group, most_images: see `OriginalLoss`.
    """

    collapses = True

    def __init__(
        self,
        width: int,
        predictor: nn.Module | bool = True,
        hidden: int | None = None,
        target: str = "momentum",
        process_group: dist.ProcessGroup | None = None,
        most_images: int | None = None,
    ):
        super().__init__(width, target, process_group, most_images)
        if not isinstance(predictor, (bool, nn.Module)):
            raise TypeError(f"predictor {predictor!r} is no module; use True, False or an nn.Module")
        if hidden is not None:
            require_whole("hidden", hidden)
            if predictor is not True:
                raise ValueError(f"hidden {hidden} is of a predictor of its own; use predictor=True, or leave it out")
        own = Predictor(self.width, hidden or max(1, self.width // 4)) if predictor is True else None
        self.predictor = predictor if isinstance(predictor, nn.Module) else own

    def predicted(self, online_VNC: Tensor) -> Sequence[Tensor] | Tensor:
        if self.predictor is None:
            return online_VNC
        if isinstance(self.predictor, Predictor):
            return self.predictor(online_VNC, self.process_group)
        return [self.predictor(view_NC) for view_NC in online_VNC]  # each by itself, as its batch statistics are

    def loss_of(self, views: Views) -> Tensor:
        return -mean(views.cosine)


class SimSiam(BYOL):
    """SimSiam: BYOL whose target is the online branch itself, without gradient.

    Its predictor's learning rate is constant in the original; that is the optimizer's matter.

    Args:
        width, predictor, hidden, target, process_group, most_images: as for `BYOL`.
    """

    def __init__(
        self,
        width: int,
        predictor: nn.Module | bool = True,
        hidden: int | None = None,
        target: str = "stop_gradient",
        process_group: dist.ProcessGroup | None = None,
        most_images: int | None = None,
    ):
        super().__init__(width, predictor, hidden, target, process_group, most_images)


class DirectPred(OriginalLoss):
    """DirectPred: BYOL whose predictor W_h is computed from the eigenvectors of F, a constant in backward.

    The host waits for the eigenvectors.

    Args:
        width: C.
        decay: ρ of F.
        epsilon: ε, what small eigenvalues are lifted by.
        every: steps from one decomposition to the next.
        kind: "authors": Λ_h = √(Λ/λ_max) + ε, as the authors' code; "paper": Λ_h = √Λ + ε·λ_max.
        target, process_group, most_images: see `OriginalLoss`.
    """

    collapses = True

    def __init__(
        self,
        width: int,
        decay: float = 0.99,
        epsilon: float = 0.3,
        every: int = 1,
        kind: str = "authors",
        target: str = "momentum",
        process_group: dist.ProcessGroup | None = None,
        most_images: int | None = None,
    ):
        super().__init__(width, target, process_group, most_images)
        require_number("epsilon", epsilon)
        require_number("decay", decay)
        require_whole("every", every)
        if decay >= 1:
            raise ValueError(f"decay {decay} is outside [0, 1); use 0.99 (the paper's)")
        if kind not in ("authors", "paper"):
            raise ValueError(f"kind {kind!r} is unknown; use 'authors' or 'paper'")
        self.decay, self.epsilon, self.every, self.kind = float(decay), float(epsilon), int(every), kind
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
        return -mean(torch.linalg.vecdot(unit(unit_VNC @ matrix_CC), views.unit_positive))
