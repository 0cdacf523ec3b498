"""The base class of the original losses. Shape suffixes: V views, N images of this rank, C embedding width."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from unigrad_fast.kernels.dispatch import host_may_read
from unigrad_fast.kernels.reference import SMALLEST_NORM
from unigrad_fast.objectives import figures, ranks
from unigrad_fast.objectives.catalogue import FORMS, MIXED, Objective, require_target
from unigrad_fast.objectives.layout import Mix, common_dtype, positives, require_mix, require_views
from unigrad_fast.objectives.output import ObjectiveOutput
from unigrad_fast.objectives.over_ranks import OverRanks
from unigrad_fast.objectives.surroundings import require_no_recomputation, without_autocast


@dataclass
class Views:
    """A batch in at least fp32; rows that are not finite are set to 0, and no gradient flows into them.

    Attributes:
        online: [V, N, C].
        target: [2, N, C], for the global views; with gradient if weights are shared.
        mix: how the online global views were mixed.
        raised: int32 [2]: whether any row, and whether any target row, is not finite on this rank.
        sums: to which a method that `measures` adds what its figures need.
    """

    online: Tensor
    target: Tensor
    mix: Mix | None
    raised: Tensor
    sums: figures.Sums = field(default_factory=dict)

    def positives(self, target_2NC: Tensor) -> Tensor:
        return positives(target_2NC, len(self.online), self.mix)

    @cached_property
    def unit_online(self) -> Tensor:
        return unit(self.online)

    @cached_property
    def unit_target(self) -> Tensor:
        return unit(self.target)

    @cached_property
    def unit_positive(self) -> Tensor:
        """m⁺ from unit embeddings, [V, N, C]."""
        return self.positives(self.unit_target)

    @cached_property
    def cosine(self) -> Tensor:
        """u·m⁺, [V, N]."""
        return torch.linalg.vecdot(self.unit_online, self.unit_positive)


class OriginalLoss(OverRanks):
    """A method's loss as its authors wrote it; autograd differentiates it.

    The loss is averaged over views. On several ranks the loss treats all ranks' images as one batch, and backward gives
    this rank's embeddings the gradient of the sum of all ranks' losses. Averaged over ranks, as the engine does, this
    equals the gradient on a single rank.

    Args:
        width: C.
        target: "momentum" and "stop_gradient" let no gradient into the targets. With "weight_sharing" gradient flows
            into both branches; pass the online branch's global views as `target` then. None is the catalogue's default.
        process_group, most_images: see `OverRanks`.
        settings: the settings that the catalogue declares for the method, with its defaults; they become attributes.

    Attributes:
        epoch: epochs done so far, a number or a float64 scalar on the device, for methods with settings in epochs. Set
            it before each step; at first it is infinite, as if all these epochs were over.

    A subclass names the `method` whose original form it is.
    """

    declared: ClassVar[type[Objective]] = Objective
    epoch: float | Tensor = math.inf

    def __init_subclass__(cls, method: str | None = None, **others: Any) -> None:
        super().__init_subclass__(**others)
        if method is not None:
            cls.declared = FORMS[f"original {method}"]
            ORIGINALS[method] = cls

    def __init__(
        self,
        width: int,
        target: str | None = None,
        process_group: dist.ProcessGroup | None = None,
        most_images: int | None = None,
        **settings: Any,
    ):
        super().__init__(width, process_group, most_images)
        self.target = target or self.declared.model_fields["target"].default
        require_target(type(self).__name__, self.target, self.declared.refused)
        for name, value in self.declared.checked(settings).items():
            setattr(self, name, value)

    def extra_repr(self) -> str:
        return f"width={self.width}, target={self.target}"

    def forward(self, online: Sequence[Tensor], target: Sequence[Tensor], mix: Mix | None = None) -> ObjectiveOutput:
        """The loss of one batch.

        Args:
            online: V ≥ 2 tensors [N, C] as the projector outputs them; global views first, local crops follow.
            target: two tensors [N, C], for the global views.
            mix: how the online global views were mixed; see `UniGrad`.

        Returns:
            `ObjectiveOutput`; metrics are `objective`, the loss, and `positive_cosine`, u·m⁺.

        Raises:
            ValueError: a wrong shape; mixing with a loss that does not support it; more images than agreed on.
        """
        require_views(online, target, self.width)
        if mix is not None:
            if self.declared.mixes_samples:
                raise ValueError(f"CutMix is refused for {type(self).__name__}: {MIXED}; leave mix out")
            require_mix(mix, online[0].shape[0], online[0].device)
        if self.training:
            require_no_recomputation()
        exact = torch.promote_types(common_dtype([*online, *target]), torch.float32)
        if self.target != "weight_sharing":
            target = [view.detach() for view in target]
        online_VNC, broken = _finite(online, common_dtype(online))
        target_2NC, broken_target = _finite(target, exact)
        predicted_VNC, broken_prediction = online_VNC.to(exact), broken
        if is_predicted := (prediction := self.predicted(online_VNC)) is not online_VNC:
            predicted_VNC, broken_prediction = _finite(prediction, exact)
        with without_autocast(online_VNC.device):
            raised = torch.stack([broken | broken_target | broken_prediction, broken_target]).to(torch.int32)
            views = Views(predicted_VNC, target_2NC, mix, raised)
            loss = self.loss_of(views)
            with torch.no_grad():
                unit_VNC = unit(online_VNC.to(exact)) if is_predicted else views.unit_online.detach()
                cosine = mean(torch.linalg.vecdot(unit_VNC, views.unit_positive) if is_predicted else views.cosine)
                flag = ranks.largest(raised[0], self.process_group) if self.over_ranks else raised[0]
                if self.measures:
                    views.sums |= figures.of_pairs(unit_VNC[:2], views.unit_target)
        metrics = {"objective": loss.detach().clone(), "positive_cosine": cosine}
        unit_MC = unit_VNC[:2].flatten(0, 1)
        flag = flag.to(loss.dtype)
        return ObjectiveOutput(loss, metrics, flag, unit_MC, views.sums, self.over_ranks, self.process_group)

    def predicted(self, online_VNC: Tensor) -> Sequence[Tensor] | Tensor:
        """The input of the loss: the online embeddings, unless a subclass predicts; runs in autocast if that is on."""
        return online_VNC

    def epoch_on(self, device: torch.device) -> Tensor:
        """`epoch` as a float64 scalar on the device."""
        if isinstance(self.epoch, Tensor):
            return self.epoch
        return torch.full((), self.epoch, dtype=torch.float64, device=device)

    def summed(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks that share a batch; differentiable."""
        return ranks.sum_over_ranks(tensor, self.process_group) if self.over_ranks else tensor

    def loss_of(self, views: Views) -> Tensor:
        """The loss, a scalar."""
        raise NotImplementedError


ORIGINALS: dict[str, type[OriginalLoss]] = {}  # by method


class _Unit(Function):
    @staticmethod
    def forward(ctx: Any, rows_VNC: Tensor) -> Tensor:
        norm_VN1 = torch.linalg.vector_norm(rows_VNC, dim=-1, keepdim=True)
        used_VN1, norm_VN1 = norm_VN1 > 0, norm_VN1.clamp_min(SMALLEST_NORM)
        unit_VNC = rows_VNC / norm_VN1
        ctx.save_for_backward(unit_VNC, torch.where(used_VN1, 1 / norm_VN1, 0.0))
        return unit_VNC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_VNC: Tensor) -> Tensor:
        unit_VNC, inverse_norm_VN1 = ctx.saved_tensors
        along_VN1 = torch.linalg.vecdot(gradient_VNC, unit_VNC).unsqueeze(-1)
        return torch.addcmul(gradient_VNC, unit_VNC, along_VN1, value=-1.0).mul_(inverse_norm_VN1)


def unit(rows_VNC: Tensor) -> Tensor:
    """z / max(‖z‖, 1e-12), with few passes over memory in backward; no gradient flows into a row of zeros."""
    return _Unit.apply(rows_VNC)


def mean(terms_VN: Tensor) -> Tensor:
    """The mean over views and images; 0 without images."""
    return terms_VN.sum() / max(1, terms_VN.numel())


def _finite(views: Sequence[Tensor] | Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The views as [V, N, C] with non-finite rows set to 0 and cut off from the gradient; and whether any was found."""
    rows_VNC = views.to(dtype) if isinstance(views, Tensor) else torch.stack([view.to(dtype) for view in views])
    exact_VNC = rows_VNC.detach().to(torch.promote_types(dtype, torch.float32))
    length = torch.linalg.vector_norm(exact_VNC)
    if host_may_read(length) and torch.isfinite(length):  # then all rows are finite
        return rows_VNC, torch.zeros_like(length, dtype=torch.bool)
    finite_VN1 = torch.isfinite(torch.linalg.vector_norm(exact_VNC, dim=-1, keepdim=True))
    return torch.where(finite_VN1, rows_VNC, 0.0), ~finite_VN1.all()
