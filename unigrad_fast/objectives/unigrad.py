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
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unigrad_fast.kernels import attach_gradient, functional, ops
from unigrad_fast.kernels.dispatch import use_triton
from unigrad_fast.objectives import ranks
from unigrad_fast.objectives.catalogue import FORMS
from unigrad_fast.objectives.checks import require_among, require_whole
from unigrad_fast.objectives.correlation import MovingCorrelation
from unigrad_fast.objectives.layout import (
    Layout,
    Mix,
    common_dtype,
    key_of,
    require_mix,
    require_targets,
    require_views,
)
from unigrad_fast.objectives.output import ObjectiveOutput
from unigrad_fast.objectives.sharded_correlation import ShardedCorrelation
from unigrad_fast.objectives.surroundings import require_no_capture, require_no_recomputation, without_autocast
from unigrad_fast.objectives.update import Batch, BegunUpdate, Room, Update

FLEETING = {"_begun": None, "_stream": None}  # what no copy has
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
        super().__init__()
        require_whole("width", width)
        if most_images is not None:
            require_whole("most_images", most_images)
        FORMS["unigrad"].checked({"balance": balance, "decay": decay, "correlation_source": correlation_source})
        require_among("placement", placement, ("replicated", "sharded"))
        if compute_dtype not in (None, torch.bfloat16, torch.float16, torch.float32):
            raise ValueError(f"compute_dtype {compute_dtype} is unknown; use torch.bfloat16, float16 or float32")
        self.width, self.balance, self.decay = int(width), float(balance), float(decay)
        self.process_group = process_group
        self.correlation_source, self.compute_dtype = correlation_source, compute_dtype
        self.most_images = most_images
        self.placement = placement
        is_sharded = placement == "sharded" and self._ranks() > 1
        self.average = ShardedCorrelation(self.width, process_group) if is_sharded else MovingCorrelation(self.width)
        self._begun: BegunUpdate | None = None
        self._stream: torch.cuda.Stream | None = None
        self._agreed: dict[int, int] = {}  # number of ranks: the most images of one
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
        rows = layout.rows
        with torch.no_grad(), without_autocast(layout.device):
            begun = self._begun_with(target, layout)
            room = self._room(layout, len(online)) if self._is_sharded else None
            if begun is None:
                batch = self._take_at_once(views, layout, kernels)
            else:
                batch = self._take_begun(begun, views[: len(online)], layout, kernels, room)
            update, nonfinite, blocks = batch.update, batch.nonfinite, []
            if isinstance(self.average, ShardedCorrelation) and room:
                gathered_MC = ranks.gather(room.filled(batch.sent_MC), self.process_group)
                if begun is not None:  # each rank has told of its online rows here, and of its targets before
                    flags = ops.sum_tails_(gathered_MC, self._ranks())[1]
                    nonfinite = torch.maximum(flags[0], update.flag)
                columns = self.average.columns(gathered_MC, batch.operand, self.process_group)
                blocks = [block[:rows] for block in columns]
            for each in (room, update.room):
                if each and not each.fits:  # now the others, who drop the step, wait for this rank no more
                    self._refuse(layout.images)
            first, second, ratio = layout.positives(mix)
            arguments: dict[str, Any] = {
                "balance": self.balance,
                "scale": 1.0 / max(1, rows),
                "first": first,
                "second": second,
                "ratio": ratio,
                "nonfinite": nonfinite,
                "skip": update.skip,
                "updates": self.average.updates if self.training and update.counts else None,
                "ticket": layout.ticket,
            }
            unit_MC = batch.sent_MC[:rows]
            branches = (unit_MC, batch.inverse_norm_M[:rows], batch.target_MC)
            if blocks:
                gradient_MC, terms = ops.gradient_of_blocks(blocks, *branches, **arguments)
            else:
                gradient_MC, terms = kernels.unigrad_gradient(*branches, batch.operand, **arguments)
        loss = attach_gradient(terms, gradient_MC, embeddings=online)
        if known is None and key is not None and {type(view) for view in views} <= {Tensor, nn.Parameter}:
            self._layouts[key] = layout
        # `data` is no view: what is done to one of them in place is nothing to the others.
        *metrics, raised = (term.data for term in terms.unbind())
        named = dict(zip(TERMS, metrics, strict=True))
        global_MC = unit_MC if rows == 2 * layout.images else unit_MC[: 2 * layout.images]
        return ObjectiveOutput(loss, named, raised, global_MC, self._over_ranks, self.process_group)

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
        self._begun = self._begin(target, early=True)

    def whole_correlation(self) -> Tensor:
        """F, [C, C], on every rank, also where it lies in shards: then all ranks call it together."""
        return self.average.gather(self.process_group)

    def effective_rank(self) -> Tensor:
        """Participation ratio of F, from 1 (collapsed) to C; reads all of F, so call it every so often.

        Where F is sharded all ranks call it together.
        """
        return self.average.effective_rank(self.process_group)

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

    def _require_same_ranks(self) -> None:
        """Raises RuntimeError where F is to be sharded and this is no longer the rank, or of as many, that it was."""
        if self.placement == "replicated":
            return
        size = self._ranks()
        rank = dist.get_rank(self.process_group) if size > 1 else 0
        had = (self.average.rank, len(self.average.sizes)) if isinstance(self.average, ShardedCorrelation) else (0, 1)
        if size != had[1]:
            raise RuntimeError(f"F is sharded over {had[1]} ranks, and there are {size}; make UniGrad anew there")
        if rank != had[0]:
            raise RuntimeError(f"these rows of F are rank {had[0]}'s, and this is rank {rank} now; make UniGrad anew")

    def _ranks(self) -> int:
        return ranks.size(self.process_group)

    @property
    def _is_sharded(self) -> bool:
        return isinstance(self.average, ShardedCorrelation)

    @property
    def _over_ranks(self) -> bool:
        """Whether a batch is one over several ranks."""
        return self.training and self._ranks() > 1

    def _room(self, layout: Layout, views: int) -> Room:
        """What is sent of some views."""
        return Room(layout.images, self._most_images(layout.images), views, self.width)

    def _units(
        self, views: Sequence[Tensor], layout: Layout, kernels: Any, room: Room | None, since: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Unit embeddings and inverse norms; from row `since` on there is room for what other ranks send more."""
        return kernels.unit_embeddings(
            views,
            layout.unit_dtype,
            layout.nonfinite[: len(views) * layout.images],
            raised=layout.raised,
            ticket=layout.ticket,
            since=since,
            spare=room.spare if room else 0,
        )

    def _take_at_once(self, views: Sequence[Tensor], layout: Layout, kernels: Any) -> Batch:
        """Both branches' unit embeddings in one launch, and in training F takes them in."""
        rows, globals_ = layout.rows, 2 * layout.images
        room = self._room(layout, 2) if self._over_ranks else None
        all_MC, inverse_norm_M = self._units(views, layout, kernels, room, since=rows)
        unit_MC, source_MC = all_MC[:rows], all_MC[rows:]
        target_MC = source_MC[:globals_] if room else source_MC
        from_target = self.correlation_source == "target"
        if not from_target:
            source_MC = torch.cat([unit_MC[:globals_], source_MC[globals_:]]) if room else unit_MC[:globals_]
        update = Update(self.average, source_MC, layout, 1 if from_target else 0, room, self.process_group)
        operand = self.average.operand(unit_MC, layout.product_dtype)  # before the update, which moves it as well
        if self.training:
            update.send()
            update.take()
        return Batch(unit_MC, inverse_norm_M, target_MC, operand, update, update.flag)

    def _take_begun(
        self, begun: BegunUpdate, online: Sequence[Tensor], layout: Layout, kernels: Any, room: Room | None
    ) -> Batch:
        """The online branch's unit embeddings, and F that has taken the targets in."""
        sent_MC, inverse_norm_M = self._units(online, layout, kernels, room)
        update = begun.finish()
        operand = self.average.operand(sent_MC, layout.product_dtype)
        nonfinite = layout.raised[0]
        if room is None:  # else the ranks tell each other with their rows
            if update.room:
                nonfinite = ranks.largest(nonfinite, self.process_group)
            nonfinite = torch.maximum(nonfinite, update.flag)
        return Batch(sent_MC, inverse_norm_M, begun.target_MC, operand, update, nonfinite)

    def _begin(self, target: Sequence[Tensor], early: bool, dtypes: tuple | None = None) -> BegunUpdate:
        """Send the targets of all ranks; what can be done without waiting for them, is done.

        Args:
            dtypes: as of `_dtypes`, where the online embeddings are known already.
        """
        known = len(self._layouts)
        layout = self._target_layout(target, dtypes)
        kernels = functional if len(self._layouts) > known else ops
        device, stream = layout.device, None
        if early and device.type == "cuda":
            stream = self._stream = self._stream or torch.cuda.Stream(device)
        with torch.no_grad(), without_autocast(device):
            room = self._room(layout, 2) if self._over_ranks else None
            self.average.operand(layout.decay, layout.product_dtype)  # F and its copy, as the update will find them
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                source_MC, _ = self._units(target, layout, kernels, room)
                update = Update(self.average, source_MC, layout, 1, room, self.process_group)
                update.send(asynchronous=early and stream is None)
                if stream is not None:
                    update.take()
                    for view in target:
                        view.record_stream(stream)
        return BegunUpdate(tuple(target), source_MC[: 2 * layout.images], update, stream)

    def _begun_with(self, target: Sequence[Tensor], layout: Layout) -> BegunUpdate | None:
        """The update that has begun with these targets; begun now, where it is always a step of its own."""
        begun = self._begun
        if begun is None:
            at_once = not (self.training and self._is_sharded and self.correlation_source == "target")
            return (
                None if at_once else self._begin(target, early=False, dtypes=(layout.unit_dtype, layout.product_dtype))
            )
        if not self.training or not begun.is_of(target):
            self._drop_begun()
            raise RuntimeError("begin_update was given other targets; call the objective with those, in training mode")
        if begun.update.layout.unit_dtype != layout.unit_dtype:
            self._drop_begun()
            raise RuntimeError(
                f"begin_update took targets in {begun.update.layout.unit_dtype}, with these online embeddings they are "
                f"needed in {layout.unit_dtype}; give UniGrad(compute_dtype=...), or both branches in one dtype"
            )
        self._begun = None
        return begun

    def _drop_begun(self) -> None:
        begun, self._begun = self._begun, None
        if begun is not None:
            begun.leave()

    def _load_from_state_dict(self, *arguments: Any) -> None:
        self._drop_begun()
        super()._load_from_state_dict(*arguments)

    def _target_layout(self, target: Sequence[Tensor], dtypes: tuple[torch.dtype, torch.dtype] | None) -> Layout:
        """`_layout` of targets alone, with scratch memory of its own."""
        require_targets(target, self.width)
        images, device = target[0].shape[0], target[0].device
        dtypes = dtypes or self._dtypes(target, target)
        key = (0, images, self.decay, device, *dtypes)
        if key not in self._layouts:
            require_no_capture("a batch of this shape")
            self._layouts[key] = Layout.of(2, images, device, *dtypes, self.decay)
        return self._layouts[key]

    def _refuse(self, images: int) -> None:
        most = self._most_images(images)
        how = "most_images" if self.most_images else "the most that a rank had in the first training step"
        raise ValueError(
            f"this rank has {images} images, more than {most}, {how}; give UniGrad(most_images={images}) or more"
        )

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
            most = ranks.agree_on_most_images(images, self.average.updates, self.process_group)
            if not self.training:  # of this batch: those of the training to come may be larger
                return most
            self._agreed[size] = most
        return self._agreed[size]

    def __deepcopy__(self, memo: dict[int, Any]) -> UniGrad:
        copied = memo[id(self)] = self.__class__.__new__(self.__class__)
        memo[id(self.process_group)] = self.process_group  # a copy shares it: it is no data
        copied.__dict__.update(copy.deepcopy({**self.__dict__, **FLEETING, "_layouts": {}}, memo))
        return copied

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not None:
            warnings.warn(
                "a process group cannot be pickled: the loaded UniGrad has the default one; set its process_group",
                stacklevel=2,
            )
        return {**self.__dict__, **FLEETING, "process_group": None, "_layouts": {}}
