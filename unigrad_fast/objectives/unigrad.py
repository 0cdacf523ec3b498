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
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unigrad_fast.kernels import attach_gradient, functional, ops
from unigrad_fast.objectives.catalogue import FORMS
from unigrad_fast.objectives.checks import require_among, require_whole
from unigrad_fast.objectives.correlation import MovingCorrelation
from unigrad_fast.objectives.layout import (
    Layout,
    Mix,
    dtypes_of,
    key_of,
    layout_of,
    require_mix,
    require_targets,
    require_views,
)
from unigrad_fast.objectives.output import ObjectiveOutput
from unigrad_fast.objectives.over_ranks import OverRanks, OwnRows
from unigrad_fast.objectives.sharded_correlation import ShardedCorrelation
from unigrad_fast.objectives.surroundings import require_no_recomputation, without_autocast
from unigrad_fast.objectives.update import Update

TERMS = ("objective", "positive_cosine", "negative_term", "surrogate")


class UniGrad(OverRanks):
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
        placement: "replicated": every rank has all of F; "sharded": each of several ranks has a block of its rows,
            about C over the number of ranks, and the process group is there before the objective is made. The numbers
            are the same to rounding. On one rank F is whole.

    `correlation` is F, [C, C], fp32 (float64 once the embeddings are float64), bitwise symmetric and the same on
    all ranks; it is part of the state dict, as is `updates`, the number of batches it has seen. On a GPU it is the
    matrix as of the moment it is asked for. Where F is sharded, `correlation` and the state dict are this rank's rows
    (with `first_row`, the number of the first), which fit the same rank of as many; a state dict with all of F fits
    any. `whole_correlation` makes all of F of the shards.

    In training mode all ranks call it together; they may have different numbers of images, also none. In evaluation
    mode F is used as it is and does not change, and all that is returned is this rank's; no rank waits for another,
    unless F is sharded: then all ranks call it together, with as many views as each other, in either mode.
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
        placement: str = "replicated",
    ):
        super().__init__(process_group, most_images)
        require_whole("width", width)
        FORMS["unigrad"].checked({"balance": balance, "decay": decay, "correlation_source": correlation_source})
        require_among("placement", placement, ("replicated", "sharded"))
        if compute_dtype not in (None, torch.bfloat16, torch.float16, torch.float32):
            raise ValueError(f"compute_dtype {compute_dtype} is unknown; use torch.bfloat16, float16 or float32")
        self.width, self.balance, self.decay = int(width), float(balance), float(decay)
        self.correlation_source, self.compute_dtype, self.placement = correlation_source, compute_dtype, placement
        is_sharded = placement == "sharded" and self._ranks() > 1
        self.average = ShardedCorrelation(self.width, process_group) if is_sharded else MovingCorrelation(self.width)
        self._begun: Update | None = None
        self._stream: torch.cuda.Stream | None = None
        self._layouts: dict[tuple | None, Layout] = {}  # also by the `key_of` batches that were taken

    def extra_repr(self) -> str:
        return f"width={self.width}, balance={self.balance}, decay={self.decay}, source={self.correlation_source}"

    @property
    def correlation(self) -> Tensor:
        """F, [C, C]; where it is sharded this rank's rows."""
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
        self._require_same_ranks()
        views = [*online, *target]
        key = key_of(views, len(target), self.decay, self.compute_dtype)
        known = self._layouts.get(key)
        layout = known or self._layout(online, target)
        # What is like an earlier batch needs no second look.
        kernels = functional if known is None or mix is not None else ops
        if mix is not None:
            self._require_mix(mix, layout)
        if self.training:
            require_no_recomputation()
        with torch.no_grad(), without_autocast(layout.device):
            if self._begun is None:
                begun = self._update(target, online, layout, kernels)
            else:
                begun, self._begun = self._begun, None
                begun.require_same(target, layout)
            unit_MC, inverse_norm_M = begun.online or layout.units(  # u, 1/‖z‖
                online, kernels, len(online), self.spare(len(online), layout.images, online[0])
            )
            batch = begun.finish()  # F ← ρ·F + (1−ρ)·B
            rows = OwnRows(self, unit_MC, layout.images, layout.raised, len(online))
            if len(unit_MC) > layout.rows:
                unit_MC = unit_MC[: layout.rows]
            gradient_of = self.average.gradient_of(rows, layout.product_dtype, kernels)  # u·F
            nonfinite = batch.raised[0]
            if begun.online is None:  # the ranks have told each other of their targets alone
                nonfinite = torch.maximum(rows.flag(), nonfinite)
            for sent in (rows, begun.source):
                sent.require_fit()
            first, second, ratio = layout.positives(mix)  # m⁺
            gradient_MC, terms = gradient_of(  # g = −m⁺ + λ·u·F, from u to z, and L
                unit_MC,
                inverse_norm_M,
                begun.target_MC,
                balance=self.balance,
                scale=1.0 / max(1, layout.rows),
                first=first,
                second=second,
                ratio=ratio,
                nonfinite=nonfinite,
                skip=begun.skip,
                updates=self.updates if self.training else None,
                ticket=layout.ticket,
            )
        loss = attach_gradient(terms, gradient_MC, embeddings=online)
        if known is None and key is not None and {type(view) for view in views} <= {Tensor, nn.Parameter}:
            self._layouts[key] = layout
        # `data` is no view: what is done to one of them in place is nothing to the others.
        *metrics, raised = (term.data for term in terms.unbind())
        named = dict(zip(TERMS, metrics, strict=True))
        global_MC = unit_MC if len(unit_MC) == 2 * layout.images else unit_MC[: 2 * layout.images]
        return ObjectiveOutput(loss, named, raised, global_MC, self.over_ranks, self.process_group)

    def begin_update(self, target: Sequence[Tensor]) -> None:
        """Begin the update of F with the targets of the next training step, before its online embeddings are there.

        The rows of F's source are then on their way to the other ranks while the online branch computes, and on a GPU
        F moves beside it, on a stream of its own. `forward` is called next, with the same target tensors; it computes
        what it computes without this. Until then F is not to be read. With F from the online branch there is nothing
        to begin with, and in evaluation mode nothing to do: then this does nothing.

        Where an error comes between, on all ranks, the next call with other targets, or a state dict that is loaded,
        drops what has begun. On the CPU F has not taken it then; on a GPU it has, and has not counted it.

        Args:
            target: as in `forward`.

        Raises:
            ValueError: as in `forward`, but that more images than `most_images` are refused there.
            RuntimeError: an update with the same targets has begun already.
        """
        if not self.training or self.correlation_source == "online":
            return
        self._require_same_ranks()
        if self._begun is not None and self._begun.is_of(target):
            raise RuntimeError("begin_update was called twice; call the objective with its targets first")
        self._drop_begun()
        known = len(self._layouts)
        layout = self._layout(None, target)
        kernels = functional if len(self._layouts) > known else ops
        with torch.no_grad(), without_autocast(layout.device):
            if layout.device.type != "cuda":
                self._begun = self._update(target, (), layout, kernels, asynchronous=True)
                return
            stream = self._stream = self._stream or torch.cuda.Stream(layout.device)
            self.average.operand(layout.decay, layout.product_dtype)  # F and its copy, as the update will find them
            stream.wait_stream(torch.cuda.current_stream(layout.device))
            with torch.cuda.stream(stream):
                begun = self._update(target, (), layout, kernels)
                begun.take_on(stream)
            self._begun = begun

    def whole_correlation(self) -> Tensor:
        """F, [C, C], on every rank, also where it lies in shards: then all ranks call it together."""
        return self.average.gather(self.process_group)

    def effective_rank(self) -> Tensor:
        """Participation ratio of F, from 1 (collapsed) to C; reads all of F, so call it every so often.

        Where F is sharded all ranks call it together.
        """
        return self.average.effective_rank(self.process_group)

    def _update(self, *batch: Any, asynchronous: bool = False) -> Update:
        return Update(self, self.average, self.correlation_source, *batch, asynchronous=asynchronous)

    def _drop_begun(self) -> None:
        begun, self._begun = self._begun, None
        if begun is not None:
            begun.leave()

    def _layout(self, online: Sequence[Tensor] | None, target: Sequence[Tensor]) -> Layout:
        """What a batch's shape determines, which is checked; of targets alone with scratch memory of its own."""
        if online is None:
            require_targets(target, self.width)
        else:
            require_views(online, target, self.width)
        views = target if online is None else online
        dtypes = dtypes_of(views, target, self.compute_dtype)
        return layout_of(self._layouts, 0 if online is None else len(online), views[0], dtypes, self.decay)

    def _require_mix(self, mix: Mix, layout: Layout) -> None:
        if self.correlation_source == "online":
            raise ValueError(
                "correlation_source 'online' with CutMix makes F from mixed images; use correlation_source='target'"
            )
        require_mix(mix, layout.images, layout.device)

    def _require_same_ranks(self) -> None:
        """Raises RuntimeError where F is to be sharded and this is no longer the rank, or of as many, that it was."""
        if self.placement == "replicated":
            return
        size, had = self._ranks(), self.average
        rank = dist.get_rank(self.process_group) if size > 1 else 0
        if size != had.shards:
            raise RuntimeError(f"F is sharded over {had.shards} ranks, and there are {size}; make UniGrad anew there")
        if rank != had.rank:
            raise RuntimeError(f"these rows of F are rank {had.rank}'s, and this is rank {rank} now; make UniGrad anew")

    def _load_from_state_dict(self, *arguments: Any) -> None:
        self._drop_begun()
        super()._load_from_state_dict(*arguments)

    def _lasting(self) -> dict[str, Any]:
        return {**super()._lasting(), "_begun": None, "_stream": None, "_layouts": {}}
