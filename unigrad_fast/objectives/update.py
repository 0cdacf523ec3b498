"""One update of F: this rank's rows go to the other ranks, and F takes those of all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unigrad_fast.kernels import ops
from unigrad_fast.kernels.reference import refusal
from unigrad_fast.kernels.structures import tail_rows
from unigrad_fast.objectives import ranks
from unigrad_fast.objectives.correlation import MovingCorrelation
from unigrad_fast.objectives.layout import Layout


class Room:
    """How many rows a rank sends: as many as the rank with the most images, and a tail.

    Args:
        images: this rank's, `most` that of the rank with the most.
        views: rows of an image.
    """

    def __init__(self, images: int, most: int, views: int, width: int):
        self.rows = views * most + tail_rows(width)
        self.fits = images <= most
        self.spare = self.rows - views * images if self.fits else 0

    def filled(self, sent_MC: Tensor) -> Tensor:
        """What is sent: the rows, where they fit; else what makes the other ranks, which wait, drop the step."""
        if not self.fits:
            return refusal(sent_MC, self.rows)
        missing = self.rows - len(sent_MC)
        return torch.nn.functional.pad(sent_MC, (0, 0, 0, missing)) if missing else sent_MC


class Update:
    """The update of F with one batch.

    Args:
        average: F.
        source_MC: rows of this rank that F takes; with several ranks all that is sent, the tail included.
        layout: of the batch; `raised` says whether its rows are finite.
        source: of both of those flags, the one that keeps F from taking the batch.
        room: with several ranks.

    Attributes:
        flag: whether a row of the launch is not finite, on any rank; an int32 scalar, as is `skip`: whether F keeps
            its value. Both are there once it is taken.
        counts: whether there is anything for F to take.
    """

    def __init__(
        self,
        average: MovingCorrelation,
        source_MC: Tensor,
        layout: Layout,
        source: int,
        room: Room | None,
        group: dist.ProcessGroup | None,
    ):
        self.average, self.layout, self.source, self.room, self.group = average, layout, source, room, group
        self.rows = source_MC
        self.flag, self.skip = layout.raised[0], layout.raised[source]
        self.counts = room.fits if room else layout.images > 0
        self._work: Any = None

    def send(self, asynchronous: bool = False) -> None:
        """Give the rows to the other ranks; with `asynchronous` nobody waits for them before `take`."""
        if self.room:
            self.rows, self._work = ranks.begin_gather(self.room.filled(self.rows), self.group, asynchronous)

    def take(self) -> None:
        """Move F."""
        if self._work is not None:
            self._work.wait()
        count = self.layout.count
        if self.room:
            count, flags = ops.sum_tails_(self.rows, ranks.size(self.group))
            self.flag, _, *skips = flags.unbind()
            self.skip = skips[self.source]
        if self.counts:
            self.average.update_(self.rows, decay=self.layout.decay, count=count, skip=self.skip)


class BegunUpdate:
    """An update that has begun with the target embeddings, before the online ones are there.

    Args:
        targets: as they were given.
        target_MC: their unit embeddings.
        stream: on which the update is computed; None: it is computed when it is waited for.
    """

    def __init__(
        self, targets: tuple[Tensor, ...], target_MC: Tensor, update: Update, stream: torch.cuda.Stream | None
    ):
        self.targets, self.target_MC, self.update, self.stream = targets, target_MC, update, stream

    def is_of(self, targets: Sequence[Tensor]) -> bool:
        """Whether it has begun with these very tensors."""
        return len(targets) == len(self.targets) and all(a is b for a, b in zip(targets, self.targets, strict=True))

    def leave(self) -> None:
        """Go on without it: whoever uses F next does so when it does not move any more."""
        if self.stream is not None:
            torch.cuda.current_stream(self.target_MC.device).wait_stream(self.stream)

    def finish(self) -> Update:
        """Wait for it, on a GPU the current stream and not the host."""
        if self.stream is None:
            self.update.take()
            return self.update
        current = torch.cuda.current_stream(self.target_MC.device)
        current.wait_stream(self.stream)
        for tensor in (self.target_MC, self.update.flag, self.update.skip):
            tensor.record_stream(current)
        return self.update


@dataclass
class Batch:
    """One batch on this rank, and F as it has taken the batch in.

    Attributes:
        sent_MC: unit embeddings of the online branch; behind them may be what is sent to the other ranks more.
        inverse_norm_M: of them first.
        target_MC: unit embeddings of the target branch.
        operand: what the product with F multiplies.
        nonfinite: whether a value of the batch is not finite, on any rank, as far as they have told each other.
    """

    sent_MC: Tensor
    inverse_norm_M: Tensor
    target_MC: Tensor
    operand: Tensor
    update: Update
    nonfinite: Tensor
