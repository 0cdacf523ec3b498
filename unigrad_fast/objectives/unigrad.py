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
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unigrad_fast.kernels import attach_gradient, effective_rank, unigrad_gradient, unit_embeddings
from unigrad_fast.kernels.dispatch import use_triton
from unigrad_fast.objectives.correlation import MovingCorrelation, require_no_capture

TERMS = ("objective", "positive_cosine", "negative_term", "surrogate")


class Mix(Protocol):
    """How CutMix mixed the online branch's global views: image i with `partner[i]`, of which `1 − ratio[i]` is seen.

    Attributes:
        partner: int64, [2, N] or two [N]: for each global view the number of the other image in this rank's batch.
        ratio: floating, the same shape: share of the area that is still image i's, 0 to 1. Partners and ratios out of
            range are refused on the CPU only: on a GPU the host would have to wait for them.
    """

    partner: Tensor | Sequence[Tensor]
    ratio: Tensor | Sequence[Tensor]


@dataclass(eq=False)
class ObjectiveOutput:
    """What an objective returns; its tensors have nothing to do with each other's memory.

    Attributes:
        loss: scalar, the mean over this rank's images; call `backward` on it.
        metrics: detached scalars on the device, over this rank's images.
        nonfinite: floating scalar on the device, the same on all ranks: 1 when an embedding of either branch, on any
            rank, is NaN or infinite, else 0. The step must then be dropped: the loss leaves those rows out.
        unit: [2·N, C] unit embeddings of the online branch's global views, detached.
    """

    loss: Tensor
    metrics: dict[str, Tensor]
    nonfinite: Tensor
    unit: Tensor

    def feature_std(self) -> Tensor:
        """Mean per-channel deviation of the unit embeddings times √C: 1 for a uniform distribution on the sphere, 0 at
        collapse; a detached scalar. Not among the metrics: it reads all embeddings once more."""
        unit_2NC = self.unit.unflatten(0, (2, -1))
        unit_2NC = unit_2NC.to(torch.promote_types(unit_2NC.dtype, torch.float32))
        return unit_2NC.std(dim=1, correction=0).mean() * unit_2NC.shape[-1] ** 0.5


@dataclass(frozen=True)
class _Layout:
    """What a batch's shape determines: its rows' positives (see `embedding_gradient`); and scalars on the device."""

    first: Tensor
    second: Tensor | None
    ratio: Tensor | None
    decay: Tensor
    count: Tensor
    ticket: Tensor


class UniGrad(nn.Module):
    """UniGrad's objective with its moving-average correlation F.

    Args:
        width: C, the embedding width.
        balance: λ, the weight of the negative term (100 in the paper, for C = 2048 and ImageNet).
        decay: ρ, the moving-average coefficient of F.
        correlation_source: "target" takes F from the target embeddings (as the authors' code does), "online" from
            the detached online embeddings (the paper's formula).
        process_group: ranks that share F (None: the default group, or one process when there is none).
        compute_dtype: of the unit embeddings on a GPU and of the operands of the product u·F everywhere: bf16, fp16 or
            fp32; sums are fp32. None: on a GPU autocast's dtype where it is on, else that of the embeddings; on the
            CPU fp32. float64 embeddings are computed in float64 whatever it says.

    `correlation` is F, [C, C], fp32 (float64 once the embeddings are float64), bitwise symmetric and the same on
    all ranks; it is part of the state dict, as is `updates`, the number of batches it has seen. On a GPU it is the
    matrix as of the moment it is asked for. In evaluation mode F is used as it is and does not change.
    """

    def __init__(
        self,
        width: int,
        balance: float = 100.0,
        decay: float = 0.99,
        correlation_source: str = "target",
        process_group: dist.ProcessGroup | None = None,
        compute_dtype: torch.dtype | None = None,
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
        if compute_dtype not in (None, torch.bfloat16, torch.float16, torch.float32):
            raise ValueError(f"compute_dtype {compute_dtype} is unknown; use torch.bfloat16, float16 or float32")
        self.width, self.balance, self.decay = width, balance, decay
        self.process_group = process_group
        self.correlation_source, self.compute_dtype = correlation_source, compute_dtype
        self.average = MovingCorrelation(width)
        self._layouts: dict[tuple, _Layout] = {}

    def extra_repr(self) -> str:
        return f"width={self.width}, balance={self.balance}, decay={self.decay}, source={self.correlation_source}"

    @property
    def correlation(self) -> Tensor:
        """F, [C, C]."""
        return self.average.whole()

    @property
    def updates(self) -> Tensor:
        """How many batches F has taken, an int64 scalar."""
        return self.average.updates

    def forward(self, online: Sequence[Tensor], target: Sequence[Tensor], mix: Mix | None = None) -> ObjectiveOutput:
        """The loss of one batch; F takes the batch in first.

        Args:
            online: V ≥ 2 tensors [N, C], the online embeddings as the projector gives them; the first two are the
                global views, local crops follow.
            target: two tensors [N, C], the target embeddings of the global views; no gradient flows into them.
            mix: how the online global views were mixed; the target's were not. A mixed view's positive is
                ratio·m[i] + (1−ratio)·m[partner], with m of the other global view.

        Returns:
            `ObjectiveOutput`; metrics are `objective` (L), `positive_cosine` (u·m⁺), `negative_term` (u·F·uᵀ) and
            `surrogate` (u·g, what the authors' code reports).

        Raises:
            ValueError: a shape that does not fit, with the shape; mixing with F from the online branch.
        """
        self._check(online, target, mix)
        images, device = online[0].shape[0], online[0].device
        rows = len(online) * images
        unit_dtype, product_dtype = self._dtypes([*online, *target])
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            nonfinite = torch.empty(rows + 2 * images, dtype=torch.int32, device=device)
            all_MC, inverse_norm_M = unit_embeddings([*online, *target], dtype=unit_dtype, nonfinite=nonfinite)
            unit_MC, target_MC = all_MC[:rows], all_MC[rows:]
            operand = self.average.operand(unit_MC, product_dtype)
            layout = self._layout(len(online), images, unit_MC)
            from_target = self.correlation_source == "target"
            source_MC = self._of_all_ranks(target_MC if from_target else unit_MC[: 2 * images])
            flags, target_flags = self._over_ranks(nonfinite, rows)
            # F never takes a part of a batch: it keeps its value when a row of its source is not finite.
            skip = target_flags if from_target else flags
            counts = self.training and images > 0
            if counts:
                self.average.update_(source_MC, decay=layout.decay, count=layout.count, skip=skip)
            first, second, ratio = self._positives(layout, mix, images)
            gradient_MC, terms = unigrad_gradient(
                unit_MC=unit_MC,
                inverse_norm_M=inverse_norm_M[:rows],
                target_KC=target_MC,
                correlation=operand,
                balance=self.balance,
                scale=1.0 / max(1, rows),
                first=first,
                second=second,
                ratio=ratio,
                nonfinite=flags,
                skip=skip,
                updates=self.average.updates if counts else None,
                ticket=layout.ticket,
            )
        loss = attach_gradient(terms, gradient_MC, embeddings=online)
        # `data` is no view: what is done to one of them in place is nothing to the others.
        *metrics, flag = (term.data for term in terms.unbind())
        return ObjectiveOutput(loss, dict(zip(TERMS, metrics, strict=True)), flag, unit_MC[: 2 * images])

    def effective_rank(self) -> Tensor:
        """Participation ratio of F, from 1 (collapsed) to C; reads all of F, so call it every so often."""
        return effective_rank(self.correlation)

    def _dtypes(self, views: list[Tensor]) -> tuple[torch.dtype, torch.dtype]:
        """Of the unit embeddings, and of the operands of the product u·F."""
        common = _common_dtype(views)
        exact = torch.promote_types(common, torch.float32)
        if exact == torch.float64:
            return exact, exact
        if not use_triton(views[0].device):
            return exact, self.compute_dtype or exact
        kind = views[0].device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else common
        return (self.compute_dtype or autocast,) * 2

    def _layout(self, views: int, images: int, like: Tensor) -> _Layout:
        exact = torch.promote_types(like.dtype, torch.float32)
        key = (views, images, self.decay, self._ranks(), like.device, exact)
        if key not in self._layouts:
            require_no_capture("a batch of this shape")
            with torch.inference_mode(False), torch.no_grad():  # it outlives the call
                self._layouts[key] = self._new_layout(views, images, like.device, exact)
        return self._layouts[key]

    def _new_layout(self, views: int, images: int, device: torch.device, exact: torch.dtype) -> _Layout:
        image_N = torch.arange(images, device=device)
        globals_2N, locals_L = torch.cat([image_N + images, image_N]), image_N.repeat(views - 2)
        is_global_M = torch.arange(views * images, device=device) < 2 * images
        return _Layout(
            first=torch.cat([globals_2N, locals_L]),
            second=torch.cat([globals_2N, locals_L + images]) if views > 2 else None,
            ratio=torch.where(is_global_M, 1.0, 0.5) if views > 2 else None,
            decay=torch.full((), self.decay, dtype=exact, device=device),
            count=torch.full((), 2.0 * images * self._ranks(), dtype=exact, device=device),
            ticket=torch.zeros((), dtype=torch.int32, device=device),
        )

    @staticmethod
    def _positives(layout: _Layout, mix: Mix | None, images: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """`first`, `second` and `ratio` of `embedding_gradient`."""
        if mix is None:
            return layout.first, layout.second, layout.ratio
        # The other global view's target, of the image and of its partner.
        second_2N = torch.cat([mix.partner[0] + images, mix.partner[1].to(layout.first.dtype)])
        ratio_2N = torch.cat([mix.ratio[0], mix.ratio[1]]).float()
        if layout.second is None or layout.ratio is None:
            return layout.first, second_2N, ratio_2N
        rest = slice(2 * images, None)
        return layout.first, torch.cat([second_2N, layout.second[rest]]), torch.cat([ratio_2N, layout.ratio[rest]])

    def _ranks(self) -> int:
        return dist.get_world_size(self.process_group) if _is_distributed() else 1

    def _of_all_ranks(self, unit_MC: Tensor) -> Tensor:
        """The rows of all ranks, in their order."""
        if self._ranks() == 1:
            return unit_MC
        gathered = unit_MC.new_empty(self._ranks(), *unit_MC.shape)
        dist.all_gather(list(gathered.unbind()), unit_MC.contiguous(), group=self.process_group)
        return gathered.flatten(0, 1)

    def _over_ranks(self, nonfinite: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """Flags of all embeddings and of the target embeddings alone; on many ranks one for all rows of a branch."""
        if self._ranks() == 1:
            return nonfinite, nonfinite[rows:]
        flags = torch.stack([nonfinite[:rows].sum(), nonfinite[rows:].sum()]).int()
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.process_group)
        return flags, flags[1:]

    def _check(self, online: Sequence[Tensor], target: Sequence[Tensor], mix: Mix | None) -> None:
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
        if mix is None:
            return
        if self.correlation_source == "online":
            raise ValueError(
                "correlation_source 'online' with CutMix makes F from mixed images; use correlation_source='target'"
            )
        images = expected[0]
        for name, pair, wanted in (("partner", mix.partner, "int64"), ("ratio", mix.ratio, "floating")):
            given = [(str(each.dtype).removeprefix("torch."), list(each.shape)) for each in pair]
            fits = all(each.is_floating_point() == (name == "ratio") and each.dtype != torch.bool for each in pair)
            if len(given) != 2 or any(shape != [images] for _, shape in given) or not fits:
                raise ValueError(
                    f"mix.{name} is {given[:3]}; give {wanted} [{images}] for each of the two global views"
                )
            # On a GPU this would make the host wait.
            if online[0].device.type == "cpu" and images:
                low, high = min(each.min().item() for each in pair), max(each.max().item() for each in pair)
                most = 1 if name == "ratio" else images - 1
                if not 0 <= low <= high <= most:
                    raise ValueError(f"mix.{name} goes from {low:g} to {high:g}; allowed is 0 to {most}")


def _common_dtype(views: Sequence[Tensor]) -> torch.dtype:
    common = views[0].dtype
    for view in views:
        common = torch.promote_types(common, view.dtype)
    return common


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
