"""One update of F: it begins with the unit embeddings of the targets and ends when F was updated with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from unigrad_fast.objectives.correlation import MovingCorrelation
from unigrad_fast.objectives.layout import Layout
from unigrad_fast.objectives.over_ranks import Gathered, OverRanks, OwnRows


class Update:
    """An update that has begun: in training the rows for F are already on their way to the other ranks.

    Args:
        objective: supplies the process group and the training mode.
        average: F.
        correlation_source: "target", or "online" if F is computed from the online embeddings.
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
        objective: OverRanks,
        average: MovingCorrelation,
        correlation_source: str,
        target: Sequence[Tensor],
        online: Sequence[Tensor],
        layout: Layout,
        kernels: Any,
        asynchronous: bool = False,
    ):
        self.average, self.layout, self.targets = average, layout, tuple(target)
        globals_, rows = 2 * layout.images, len(online) * layout.images
        spare = objective.spare(2, layout.images, target[0])
        all_MC, inverse_norm_M = layout.units([*online, *target], kernels, spare=spare)
        unit_MC, source_MC = all_MC[:rows], all_MC[rows:]
        self.target_MC = source_MC[:globals_] if spare else source_MC
        self.online = (unit_MC, inverse_norm_M[:rows]) if online else None
        self._source = 0 if correlation_source == "online" else 1
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
