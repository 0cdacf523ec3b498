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
from unigrad_fast.objectives import figures
from unigrad_fast.objectives.checks import require_among, require_number
from unigrad_fast.objectives.correlation import MovingCorrelation
from unigrad_fast.objectives.layout import Layout, Mix, dtypes_of, key_of, layout_of, require_mix, require_views
from unigrad_fast.objectives.output import TERMS, ObjectiveOutput
from unigrad_fast.objectives.over_ranks import Gathered, OverRanks, OwnRows
from unigrad_fast.objectives.sharded_correlation import ShardedCorrelation
from unigrad_fast.objectives.surroundings import require_no_recomputation, without_autocast


class Update:
    """An update of F that has begun: in training its rows are already on their way to the other ranks.

    Args:
        objective: its F is updated.
        target: the targets.
        online: the online branch's views if they already exist; one launch then computes all unit embeddings.
        layout: layout of the batch.
        kernels: `functional`, or `ops` if batches like this one have been checked before.
        asynchronous: do not wait for other ranks' rows before `finish`.

    Attributes:
        target_MC: unit embeddings of the targets.
        online: unit embeddings and inverse norms of the online branch; None if it did not exist yet.
        skip: the flag that keeps F unchanged if it is not 0; valid after `finish`.
    """

    def __init__(
        self,
        objective: UniGrad,
        target: Sequence[Tensor],
        online: Sequence[Tensor],
        layout: Layout,
        kernels: Any,
        asynchronous: bool = False,
    ):
        self.average, self.layout, self.targets = objective.average, layout, tuple(target)
        globals_, rows = 2 * layout.images, len(online) * layout.images
        spare = objective.spare(2, layout.images, target[0])
        all_MC, inverse_norm_M = layout.units([*online, *target], kernels, spare=spare)
        unit_MC, source_MC = all_MC[:rows], all_MC[rows:]
        self.target_MC = source_MC[:globals_] if spare else source_MC
        self.online = (unit_MC, inverse_norm_M[:rows]) if online else None
        self._source = 0 if objective.correlation_source == "online" else 1
        if self._source == 0:
            source_MC = torch.cat([unit_MC[:globals_], source_MC[globals_:]]) if spare else unit_MC[:globals_]
        self.source = OwnRows(objective, source_MC, layout.images, layout.raised, 2, layout.count)
        if objective.training:
            self.source.begin(asynchronous)
        self.skip = layout.raised
        self._taken: Gathered | None = None
        self._stream: torch.cuda.Stream | None = None

    def is_of(self, targets: Sequence[Tensor]) -> bool:
        """Whether the update began with exactly these tensors."""
        return len(targets) == len(self.targets) and all(a is b for a, b in zip(targets, self.targets, strict=True))

    def require_same(self, targets: Sequence[Tensor], layout: Layout) -> None:
        """Raise RuntimeError unless the update began with these targets, in this batch's dtype and in training mode."""
        if not self.average.training or not self.is_of(targets):
            self.leave()
            raise RuntimeError("begin_update was given other targets; call the objective with them, in training mode")
        if self.layout.unit_dtype != layout.unit_dtype:
            self.leave()
            raise RuntimeError(
                f"begin_update normalised the targets in {self.layout.unit_dtype}, but with these online embeddings "
                f"they are needed in {layout.unit_dtype}; give UniGrad(compute_dtype=...), or use one dtype for both "
                "branches"
            )

    def take_on(self, stream: torch.cuda.Stream) -> None:
        """Update F now on `stream`, which must be the current one, in parallel with the GPU's other streams."""
        self._taken, self._stream = self._take(), stream
        for view in self.targets:
            view.record_stream(stream)

    def leave(self) -> None:
        """Make the current stream wait for the update of F, so that F can be used safely from now on."""
        if self._stream is not None:
            torch.cuda.current_stream(self.target_MC.device).wait_stream(self._stream)

    def finish(self) -> Gathered:
        """Finish the update and return the rows of all ranks; on a GPU the current stream waits, not the host.

        In training F has been updated with these rows.
        """
        if self._taken is None:
            return self._take()
        self.leave()
        for tensor in (self.target_MC, self._taken.raised, self._taken.skip):
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
        return self._taken

    def _take(self) -> Gathered:
        batch, layout = self.source.finish(), self.layout
        self.skip = batch.skip[self._source]
        if self.average.training:
            self.average.take(batch, layout.decay, self.skip, layout.product_dtype)
        return batch


class UniGrad(OverRanks):
    """UniGrad's objective with its moving-average correlation F.

    Args:
        width: C, the embedding width.
        balance: λ, the weight of the negative term (100 in the paper, for C = 2048 and ImageNet).
        decay: ρ, the moving-average coefficient of F.
        correlation_source: "target" computes F from the target embeddings (as the authors' code does), "online" from
            the detached online embeddings (the paper's formula).
        process_group: ranks that share F (None: the default group, or one process if there is none).
        compute_dtype: dtype of the unit embeddings on a GPU, and of the operands of the product u·F everywhere: bf16,
            fp16 or fp32; sums are fp32. None: on a GPU autocast's dtype if autocast is on, else the dtype of the online
            embeddings; on the CPU fp32. float64 embeddings are always computed in float64.
        most_images: the most images a rank may have in a training step, the same on all ranks; None: the largest
            number on any rank in the first training step, which the ranks agree on in a collective.
        placement: "replicated": every rank has all of F; "sharded": each rank has a block of about C / ranks rows, and
            the process group must exist before the objective is created. Results agree up to rounding. On a single
            rank F is whole.

    `correlation` is F, [C, C], fp32 (float64 once the embeddings are float64), bitwise symmetric and the same on
    all ranks; it is part of the state dict, as is `updates`, the number of batches F was updated with. On a GPU each
    access returns F as of that moment. If F is sharded, `correlation` and the state dict hold this rank's rows (and
    `first_row`, the index of the first). Such a state dict loads only on the same rank of the same number of ranks; one
    with all of F loads anywhere. `whole_correlation` gathers all of F from the shards.

    In training mode all ranks must call the objective together; their numbers of images may differ, and may be 0. In
    evaluation mode F is read but not changed, and everything returned covers this rank only. No rank waits for another
    then, unless F is sharded: in that case all ranks must call it together in either mode, with the same number of
    views.
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
        super().__init__(width, process_group, most_images)
        # Not by the catalogue: the device check runs UniGrad where Pydantic is not installed.
        require_number("balance", balance)
        require_number("decay", decay, below=1)
        require_among("correlation_source", correlation_source, ("target", "online"))
        require_among("placement", placement, ("replicated", "sharded"))
        if compute_dtype not in (None, torch.bfloat16, torch.float16, torch.float32):
            raise ValueError(f"compute_dtype {compute_dtype} is unknown; use torch.bfloat16, float16 or float32")
        self.balance, self.decay = float(balance), float(decay)
        self.correlation_source, self.compute_dtype, self.placement = correlation_source, compute_dtype, placement
        is_sharded = placement == "sharded" and self._ranks() > 1
        self.average = ShardedCorrelation(self.width, process_group) if is_sharded else MovingCorrelation(self.width)
        self._begun: Update | None = None
        self._stream: torch.cuda.Stream | None = None
        self._layouts: dict[tuple | None, Layout] = {}  # by shape, and by the `key_of` batches seen before

    def extra_repr(self) -> str:
        return f"width={self.width}, balance={self.balance}, decay={self.decay}, source={self.correlation_source}"

    @property
    def correlation(self) -> Tensor:
        """F, [C, C]; if it is sharded, this rank's rows."""
        return self.average.whole()

    @property
    def updates(self) -> Tensor:
        """Number of batches F was updated with, an int64 scalar."""
        return self.average.updates

    def forward(self, online: Sequence[Tensor], target: Sequence[Tensor], mix: Mix | None = None) -> ObjectiveOutput:
        """The loss of one batch; in training F is updated with the batch first.

        Args:
            online: V ≥ 2 tensors [N, C], the online embeddings as the projector outputs them; the first two are the
                global views, local crops follow.
            target: two tensors [N, C], the target embeddings of the global views; no gradient flows into them.
            mix: how the online global views were mixed; the target views must be unmixed. A mixed view's positive is
                ratio·m[i] + (1−ratio)·m[partner], with m from the other global view.

        Returns:
            `ObjectiveOutput`; metrics are `objective` (L), `positive_cosine` (u·m⁺), `negative_term` (u·F·uᵀ) and
            `surrogate` (u·g, what the authors' code reports).

        Raises:
            ValueError: a wrong shape, with the shape; mixing with F from the online branch; more images than
                `most_images`.
            RuntimeError: activation checkpointing calls the objective again.
        """
        self._require_same_ranks()
        views = [*online, *target]
        key = key_of(views, len(target), self.decay, self.compute_dtype)
        known = self._layouts.get(key)
        layout = known or self._layout(online, target)
        # A batch like an earlier one is not checked again.
        kernels = functional if known is None or mix is not None else ops
        if mix is not None and self.correlation_source == "online":
            raise ValueError(
                "correlation_source 'online' with CutMix computes F from mixed images; use correlation_source='target'"
            )
        if mix is not None:
            require_mix(mix, layout.images, layout.device)
        if self.training:
            require_no_recomputation()
        with torch.no_grad(), without_autocast(layout.device):
            if self._begun is None:
                begun = Update(self, target, online, layout, kernels)
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
            if begun.online is None:  # so far the ranks exchanged flags for their targets only
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
        # `data` is not a view to autograd: changing one metric in place does not invalidate the others.
        *metrics, raised = (term.data for term in terms.unbind())
        named = dict(zip(TERMS, metrics, strict=True))
        global_MC = unit_MC if len(unit_MC) == 2 * layout.images else unit_MC[: 2 * layout.images]
        sums = {}
        if self.measures:
            with torch.no_grad(), without_autocast(layout.device):
                pairs = (each.unflatten(0, (2, layout.images)) for each in (global_MC, begun.target_MC))
                sums = figures.of_pairs(*pairs)
        return ObjectiveOutput(loss, named, raised, global_MC, sums, self.over_ranks, self.process_group)

    def begin_update(self, target: Sequence[Tensor]) -> None:
        """Begin the update of F with the next training step's targets, before its online embeddings exist.

        The target rows travel to the other ranks while the online branch computes; on a GPU, F is updated at the same
        time on a separate stream. Call `forward` next, with the same target tensors; its results are the same as
        without this call. Do not read F in between. If F comes from the online branch, or in evaluation mode, this does
        nothing.

        If an error occurs in between on all ranks, the next call with other targets, or loading a state dict, drops the
        update. On the CPU F is then unchanged; on a GPU it was updated, but `updates` was not incremented.

        Args:
            target: as in `forward`.

        Raises:
            ValueError: as in `forward`, except that too many images are only refused there.
            RuntimeError: an update with the same targets has already begun.
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
                self._begun = Update(self, target, (), layout, kernels, asynchronous=True)
                return
            stream = self._stream = self._stream or torch.cuda.Stream(layout.device)
            self.average.operand(layout.decay, layout.product_dtype)  # prepare F and its copy
            stream.wait_stream(torch.cuda.current_stream(layout.device))
            with torch.cuda.stream(stream):
                begun = Update(self, target, (), layout, kernels)
                begun.take_on(stream)
            self._begun = begun

    def whole_correlation(self) -> Tensor:
        """F, [C, C], on every rank; if F is sharded, all ranks must call this together."""
        return self.average.gather(self.process_group)

    def effective_rank(self) -> Tensor:
        """Participation ratio of F, from 1 (collapsed) to C; it reads all of F, so do not call it in every step.

        If F is sharded, all ranks must call this together.
        """
        return self.average.effective_rank(self.process_group)

    def _drop_begun(self) -> None:
        begun, self._begun = self._begun, None
        if begun is not None:
            begun.leave()

    def _layout(self, online: Sequence[Tensor] | None, target: Sequence[Tensor]) -> Layout:
        """Check the batch and return its layout; a batch of targets only has its own layout and scratch memory."""
        require_views(online, target, self.width)
        views = target if online is None else online
        dtypes = dtypes_of(views, target, self.compute_dtype)
        return layout_of(self._layouts, 0 if online is None else len(online), views[0], dtypes, self.decay)

    def _require_same_ranks(self) -> None:
        """Raise RuntimeError if F is sharded and the rank or the number of ranks has changed since it was created."""
        if self.placement == "replicated":
            return
        size, had = self._ranks(), self.average
        rank = dist.get_rank(self.process_group) if size > 1 else 0
        if size != had.shards:
            raise RuntimeError(f"F is sharded over {had.shards} ranks, but there are {size} now; create UniGrad again")
        if rank != had.rank:
            raise RuntimeError(f"these rows of F belong to rank {had.rank}, not rank {rank}; create UniGrad again")

    def _load_from_state_dict(self, *arguments: Any) -> None:
        self._drop_begun()
        super()._load_from_state_dict(*arguments)

    def _lasting(self) -> dict[str, Any]:
        return {**super()._lasting(), "_begun": None, "_stream": None, "_layouts": {}}
