"""The UniGrad objective (the paper, section "UniGrad", pseudocode in its appendix).

    B   = (1 / (2·N·W)) · Σ over ranks and both global views of mᵀm
    F  ← B on the very first step, afterwards ρ·F + (1−ρ)·B          (updated before it is used)
    g   = −m⁺ + λ·u·F                                                (gradient with respect to u)
    L   = mean over images and views of −u·m⁺ + (λ/2)·u·F·uᵀ         (the objective that is reported)

u and m are the ℓ2-normalised embeddings of the online and of the target branch. For a global view the positive
m⁺ is the other view's target, for a local crop the mean of both.

Shape suffixes: V views, N images per rank, C embedding width, M = V·N rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unigrad_fast.kernels import (
    attach_gradient,
    effective_rank,
    unigrad_gradient,
    unit_embeddings,
    update_correlation_,
)


@dataclass(frozen=True)
class ObjectiveOutput:
    """What an objective returns.

    Attributes:
        loss: scalar, the mean over this rank's images; call `backward` on it.
        metrics: detached scalars on the device, over this rank's images.
        nonfinite: int32 scalar on the device, the same on all ranks: 1 when an embedding of either branch, on any
            rank, is NaN or infinite. The step must then be dropped: the loss leaves those rows out.
    """

    loss: Tensor
    metrics: dict[str, Tensor]
    nonfinite: Tensor


class UniGrad(nn.Module):
    """UniGrad's objective with its moving-average correlation F.

    Args:
        width: C, the embedding width.
        balance: λ, the weight of the negative term (100 in the paper, for C = 2048 and ImageNet).
        decay: ρ, the moving-average coefficient of F.
        correlation_source: "target" takes F from the target embeddings (as the authors' code does), "online" from
            the detached online embeddings (the paper's formula).
        process_group: ranks that share F (None: the default group, or one process when there is none).

    `correlation` is F, [C, C], fp32 (float64 once the embeddings are float64), bitwise symmetric and the same on
    all ranks; it is part of the state dict, as is `updates`, the number of batches it has seen. In evaluation
    mode F is used as it is and does not change.
    """

    def __init__(
        self,
        width: int,
        balance: float = 100.0,
        decay: float = 0.99,
        correlation_source: str = "target",
        process_group: dist.ProcessGroup | None = None,
    ):
        super().__init__()
        if width < 1:
            raise ValueError(f"width {width} is not a positive number of channels")
        if not balance >= 0:
            raise ValueError(f"balance {balance} is negative; use 0 or more (100 in the paper)")
        if not 0 <= decay < 1:
            raise ValueError(f"decay {decay} is outside [0, 1); use 0.99 (the paper's)")
        if correlation_source not in ("target", "online"):
            raise ValueError(f"correlation_source {correlation_source!r} is unknown; use 'target' or 'online'")
        self.width, self.balance, self.decay = width, balance, decay
        self.correlation_source = correlation_source
        self.process_group = process_group
        self.register_buffer("correlation", torch.zeros(width, width))
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))

    def extra_repr(self) -> str:
        return f"width={self.width}, balance={self.balance}, decay={self.decay}, source={self.correlation_source}"

    def forward(self, online: Sequence[Tensor], target: Sequence[Tensor]) -> ObjectiveOutput:
        """The loss of one batch; F takes the batch in first.

        Args:
            online: V ≥ 2 tensors [N, C], the online embeddings as the projector gives them; the first two are the
                global views, local crops follow.
            target: two tensors [N, C], the target embeddings of the global views; no gradient flows into them.

        Returns:
            `ObjectiveOutput`; metrics are `objective` (L), `positive_cosine` (u·m⁺), `negative_term` (u·F·uᵀ),
            `surrogate` (u·g, what the authors' code reports) and `feature_std` (mean per-channel deviation of the
            global unit embeddings times √C: 1 for a uniform distribution on the sphere, 0 at collapse).

        Raises:
            ValueError: a shape that does not fit, with the shape.
        """
        self._check(online, target)
        device_type = online[0].device.type
        with torch.no_grad(), torch.autocast(device_type, enabled=False):
            flags = torch.zeros(2, dtype=torch.int32, device=online[0].device)
            target_MC, _ = unit_embeddings(torch.cat([view.detach() for view in target]), flags[0])
            unit_MC, inverse_norm_M = unit_embeddings(torch.cat([view.detach() for view in online]), flags[1])
            self._reduce(flags, dist.ReduceOp.MAX)

            images = online[0].shape[0]
            source_MC = target_MC if self.correlation_source == "target" else unit_MC[: 2 * images]
            self._match_correlation_to(source_MC)
            if self.training:
                # F never takes a part of a batch: it keeps its value when a row of its source is not finite.
                self._update(source_MC, flags[0] if self.correlation_source == "target" else flags.amax())

            gradient_MC, cosine_M, negative_M = unigrad_gradient(
                unit_MC,
                inverse_norm_M,
                self._positive(target_MC, len(online)),
                self.correlation,
                balance=self.balance,
                scale=1.0 / unit_MC.shape[0],
            )
            cosine, negative = cosine_M.mean(), negative_M.mean()
            deviation = unit_MC[: 2 * images].unflatten(0, (2, images)).std(dim=1, correction=0).mean()
            metrics = {
                "objective": self.balance / 2 * negative - cosine,
                "positive_cosine": cosine,
                "negative_term": negative,
                "surrogate": self.balance * negative - cosine,
                "feature_std": deviation * self.width**0.5,
            }
        loss = attach_gradient(metrics["objective"], online, gradient_MC.split(images))
        return ObjectiveOutput(loss, metrics, flags.amax())

    def effective_rank(self) -> Tensor:
        """Participation ratio of F, from 1 (collapsed) to C; reads all of F, so call it every so often."""
        return effective_rank(self.correlation)

    def _update(self, source_MC: Tensor, skip: Tensor) -> None:
        ranks = dist.get_world_size(self.process_group) if _is_distributed() else 1
        decay = torch.full((), self.decay, dtype=source_MC.dtype, device=source_MC.device)
        update_correlation_(
            self.correlation,
            source_MC,
            decay=torch.where(self.updates == 0, 0.0, decay),
            count=source_MC.shape[0] * ranks,
            skip=skip,
            reduce_=self._reduce if ranks > 1 else None,
        )
        self.updates += 1 - skip

    @staticmethod
    def _positive(target_MC: Tensor, views: int) -> Tensor:
        first_NC, second_NC = target_MC.chunk(2)
        local = [(first_NC + second_NC) / 2] if views > 2 else []
        return torch.cat([second_NC, first_NC, *local * (views - 2)])

    def _reduce(self, tensor: Tensor, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        if _is_distributed():
            dist.all_reduce(tensor, op=operation, group=self.process_group)

    def _match_correlation_to(self, unit_MC: Tensor) -> None:
        if self.correlation.dtype != unit_MC.dtype or self.correlation.device != unit_MC.device:
            self.correlation = self.correlation.to(unit_MC.device, unit_MC.dtype)
            self.updates = self.updates.to(unit_MC.device)

    def _check(self, online: Sequence[Tensor], target: Sequence[Tensor]) -> None:
        if len(target) != 2 or len(online) < 2:
            raise ValueError(
                f"got {len(online)} online and {len(target)} target views; give two or more online views "
                "(global views first) and the two global views' targets"
            )
        expected = (online[0].shape[0], self.width)
        for name, views in (("online", online), ("target", target)):
            for number, view in enumerate(views):
                if tuple(view.shape) != expected:
                    raise ValueError(
                        f"{name}[{number}] has shape {tuple(view.shape)}, expected {expected}: "
                        "all views hold the same images, and their width is the objective's"
                    )


def build(method: str, width: int, **settings) -> nn.Module:
    """The objective of a method by its name.

    Args:
        method: "unigrad".
        width: C, the embedding width.
        settings: keyword arguments of the objective.

    Raises:
        ValueError: an unknown name, with the known ones.
    """
    if method not in METHODS:
        raise ValueError(f"method {method!r} is unknown; use one of {', '.join(METHODS)}")
    return METHODS[method](width=width, **settings)


METHODS: dict[str, type[nn.Module]] = {"unigrad": UniGrad}


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()
