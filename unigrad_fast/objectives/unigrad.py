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

import copy
import numbers
import operator
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unigrad_fast.kernels import attach_gradient, effective_rank, functional, unchecked
from unigrad_fast.kernels.dispatch import use_triton
from unigrad_fast.kernels.reference import refusal
from unigrad_fast.kernels.structures import tail_rows
from unigrad_fast.objectives import ranks
from unigrad_fast.objectives.correlation import MovingCorrelation, require_no_capture
from unigrad_fast.objectives.layout import Layout, Mix, common_dtype, require_mix, require_views
from unigrad_fast.objectives.output import ObjectiveOutput

TERMS = ("objective", "positive_cosine", "negative_term", "surrogate")


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
            fp32; sums are fp32. None: on a GPU autocast's dtype where it is on, else that of the online embeddings;
            on the CPU fp32. float64 embeddings are computed in float64 whatever it says.
        most_images: the most images that a rank can have in a training step, the same on all ranks; None: as many as
            the rank that has the most in the first one, which all ranks find out together.

    `correlation` is F, [C, C], fp32 (float64 once the embeddings are float64), bitwise symmetric and the same on
    all ranks; it is part of the state dict, as is `updates`, the number of batches it has seen. On a GPU it is the
    matrix as of the moment it is asked for.

    In training mode all ranks call it together; they may have different numbers of images, also none. In evaluation
    mode F is used as it is and does not change, no rank waits for another, and all that is returned is this rank's.
    """

    def __init__(
        self,
        width: int,
        balance: float = 100.0,
        decay: float = 0.99,
        correlation_source: str = "target",
        process_group: dist.ProcessGroup | None = None,
        compute_dtype: torch.dtype | None = None,
        most_images: int | None = None,
    ):
        super().__init__()
        for name, number in (("width", width), ("most_images", most_images)):
            if number is not None and (not isinstance(number, numbers.Integral) or isinstance(number, bool)):
                raise TypeError(f"{name} {number!r} is no whole number; use an int")
        for name, factor in (("balance", balance), ("decay", decay)):
            if not isinstance(factor, numbers.Real) or isinstance(factor, bool):
                raise TypeError(f"{name} {factor!r} is no number; use a float")
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
        if most_images is not None and most_images < 1:
            raise ValueError(f"most_images {most_images} is not a positive number of images")
        self.width, self.balance, self.decay = int(width), float(balance), float(decay)
        self.process_group = process_group
        self.correlation_source, self.compute_dtype = correlation_source, compute_dtype
        self.most_images = most_images
        self.average = MovingCorrelation(self.width)
        self._agreed: dict[int, int] = {}  # number of ranks: the most images of one
        self._layouts: dict[tuple | None, Layout] = {}  # also by the `_key` of batches that were taken

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
            ValueError: a shape that does not fit, with the shape; mixing with F from the online branch; more images
                than `most_images`.
            RuntimeError: activation checkpointing calls it again.
        """
        views = [*online, *target]
        key = _key(views, len(target), self.decay, self.compute_dtype)
        known = self._layouts.get(key)
        layout = known or self._layout(online, target)
        # What is like an earlier batch needs no second look.
        kernels = functional if known is None or mix is not None else unchecked
        if mix is not None:
            self._require_mix(mix, layout)
        if self.training:
            _require_no_recomputation()
        images, rows, device, average = layout.images, layout.rows, layout.device, self.average
        autocast = torch.is_autocast_enabled(device.type)
        with torch.no_grad(), torch.autocast(device.type, enabled=False) if autocast else nullcontext():
            over_ranks = self.training and self._ranks() > 1
            spare = self._spare_rows(layout) if over_ranks else 0
            all_MC, inverse_norm_M = kernels.unit_embeddings(
                views,
                layout.unit_dtype,
                layout.nonfinite,
                raised=layout.raised,
                ticket=layout.ticket,
                since=rows,
                spare=max(0, spare),
            )
            unit_MC, sent_MC = all_MC[:rows], all_MC[rows:]
            target_MC = sent_MC if not spare else sent_MC[: 2 * images]
            global_MC = unit_MC if rows == 2 * images else unit_MC[: 2 * images]
            operand = average.operand(unit_MC, layout.product_dtype)
            from_target = self.correlation_source == "target"
            flags, skip = layout.raised[0], layout.raised[1 if from_target else 0]
            source_MC, count = target_MC if from_target else global_MC, layout.count
            if over_ranks:
                if not from_target:
                    sent_MC = torch.cat([global_MC, sent_MC[2 * images :]])
                source_MC, count, (flags, _, *skips) = self._over_ranks(sent_MC, spare, layout)
                skip = skips[1 if from_target else 0]
            # F never takes a part of a batch: it keeps its value when a row of its source is not finite.
            counts = self.training and (over_ranks or images > 0)
            if counts:
                average.update_(source_MC, decay=layout.decay, count=count, skip=skip)
            first, second, ratio = layout.positives(mix)
            gradient_MC, terms = kernels.unigrad_gradient(
                unit_MC,
                inverse_norm_M[:rows],
                target_MC,
                operand,
                balance=self.balance,
                scale=1.0 / max(1, rows),
                first=first,
                second=second,
                ratio=ratio,
                nonfinite=flags,
                skip=skip,
                updates=average.updates if counts else None,
                ticket=layout.ticket,
            )
        loss = attach_gradient(terms, gradient_MC, embeddings=online)
        if known is None and key is not None and {type(view) for view in views} <= {Tensor, nn.Parameter}:
            self._layouts[key] = layout
        # `data` is no view: what is done to one of them in place is nothing to the others.
        *metrics, flag = (term.data for term in terms.unbind())
        named = dict(zip(TERMS, metrics, strict=True))
        return ObjectiveOutput(loss, named, flag, global_MC, over_ranks, self.process_group)

    def effective_rank(self) -> Tensor:
        """Participation ratio of F, from 1 (collapsed) to C; reads all of F, so call it every so often."""
        return effective_rank(self.correlation)

    def _layout(self, online: Sequence[Tensor], target: Sequence[Tensor]) -> Layout:
        """What a batch's shape determines, which is checked."""
        require_views(online, target, self.width)
        images, device = online[0].shape[0], online[0].device
        unit_dtype, product_dtype = self._dtypes(online, target)
        key = (len(online), images, self.decay, device, unit_dtype, product_dtype)
        if key not in self._layouts:
            require_no_capture("a batch of this shape")
            self._layouts[key] = Layout.of(len(online), images, device, unit_dtype, product_dtype, self.decay)
        return self._layouts[key]

    def _dtypes(self, online: Sequence[Tensor], target: Sequence[Tensor]) -> tuple[torch.dtype, torch.dtype]:
        """Of the unit embeddings, and of the operands of the product u·F."""
        exact = torch.promote_types(common_dtype([*online, *target]), torch.float32)
        if exact == torch.float64:
            return exact, exact
        device = online[0].device
        if not use_triton(device):
            return exact, self.compute_dtype or exact
        enabled = torch.is_autocast_enabled(device.type)
        usual = torch.get_autocast_dtype(device.type) if enabled else common_dtype(online)
        return (self.compute_dtype or usual,) * 2

    def _require_mix(self, mix: Mix, layout: Layout) -> None:
        if self.correlation_source == "online":
            raise ValueError(
                "correlation_source 'online' with CutMix makes F from mixed images; use correlation_source='target'"
            )
        require_mix(mix, layout.images, layout.device)

    def _ranks(self) -> int:
        return ranks.size(self.process_group)

    def _spare_rows(self, layout: Layout) -> int:
        """Rows that are sent besides this rank's: what others may have more, and a tail; below 0 they do not fit."""
        most = 2 * self._most_images(layout.images)
        missing = most - 2 * layout.images
        return missing + tail_rows(self.width) if missing >= 0 else missing

    def _over_ranks(self, sent_MC: Tensor, spare: int, layout: Layout) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Of all ranks: what F takes, how many rows, and the flags of `sum_tails_`.

        Args:
            sent_MC: this rank's rows and `spare` more.
        """
        group = self.process_group
        if spare < 0:  # the others wait for this rank; they drop the step
            most = self._most_images(layout.images)
            ranks.gather(refusal(sent_MC, 2 * most + tail_rows(self.width)), group)
            how = "most_images" if self.most_images else "the most that a rank had in the first training step"
            raise ValueError(
                f"this rank has {layout.images} images, more than {most}, {how}; "
                f"give UniGrad(most_images={layout.images}) or more"
            )
        gathered_MC = ranks.gather(sent_MC, group)
        count, flags = unchecked.sum_tails_(gathered_MC, ranks.size(group))
        return gathered_MC, count, flags.unbind()

    def _most_images(self, images: int) -> int:
        """The number of images that every rank's rows are filled up to."""
        if self.most_images is not None:
            return self.most_images
        size = self._ranks()
        if size not in self._agreed:
            if torch.compiler.is_compiling():
                raise RuntimeError(
                    "compiled code cannot find out how many images the other ranks have; give "
                    "UniGrad(most_images=...), or make one training step on all ranks before it is compiled"
                )
            require_no_capture("this number of ranks")
            self._agreed[size] = ranks.agree_on_most_images(images, self.average.updates, self.process_group)
        return self._agreed[size]

    def __deepcopy__(self, memo: dict[int, Any]) -> UniGrad:
        copied = memo[id(self)] = self.__class__.__new__(self.__class__)
        memo[id(self.process_group)] = self.process_group  # a copy shares it: it is no data
        copied.__dict__.update(copy.deepcopy({**self.__dict__, "_layouts": {}}, memo))
        return copied

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not None:
            warnings.warn(
                "a process group cannot be pickled: the loaded UniGrad has the default one; set its process_group",
                stacklevel=2,
            )
        return {**self.__dict__, "process_group": None, "_layouts": {}}


_LOOK = operator.attrgetter("__class__", "shape", "dtype", "device")


def _key(views: list[Tensor], targets: int, *settings: Any) -> tuple | None:
    """All that decides whether a batch can be taken, and how; None for what has to be looked at every time."""
    if torch.compiler.is_compiling():
        return None
    try:
        looks = tuple(map(_LOOK, views))
        device = views[0].device
        autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    except (AttributeError, IndexError):  # no tensors
        return None
    return targets, looks, autocast, use_triton(device), *settings


def _require_no_recomputation() -> None:
    if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:
        raise RuntimeError(
            "activation checkpointing calls UniGrad again in the backward pass, and F would take the batch twice; call "
            "the objective outside of torch.utils.checkpoint (it keeps no more than one array of the embeddings' size)"
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
