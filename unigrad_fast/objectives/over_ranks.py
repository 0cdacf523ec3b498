"""Objectives that span all ranks, and the one way in which rows travel between ranks.

Every rank sends the same number of rows: its own, zero padding up to the rank with the most images, and a tail that
says how many rows are real and whether all are finite (see `kernels.tails`). The host never waits for the transfer.

Shape suffixes: W ranks, V views, N images of this rank, K images of all ranks, M rows, C embedding width.
"""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unigrad_fast.kernels import ops
from unigrad_fast.kernels.reference import DIGIT, TAIL, refusal, tail_rows
from unigrad_fast.objectives import ranks
from unigrad_fast.objectives.checks import require_whole
from unigrad_fast.objectives.surroundings import require_no_capture


@dataclass
class Gathered:
    """Rows of all ranks.

    Attributes:
        rows: [V, K, C], the same number from each rank; ranks with fewer images pad with rows of zeros. From `OwnRows`
            it is [K, C], with the views flattened and each row counted as an image.
        count: number of images, a scalar in the dtype of the rows (at least fp32).
        raised: int32 [2], the flags of all ranks combined.
        skip: like `raised`, but also raised if no rank has an image.
        own: the slice of K that belongs to this rank.
        is_image: bool [K], False for padding; None if there is no padding, or if nobody needs to know.
    """

    rows: Tensor
    count: Tensor
    raised: Tensor
    skip: Tensor
    own: slice
    is_image: Tensor | None = None

    @classmethod
    def of_this_rank(cls, rows: Tensor, raised: Tensor, count: Tensor | None = None) -> Gathered:
        images = rows.shape[-2]
        if count is None:
            exact = torch.promote_types(rows.dtype, torch.float32)
            count = torch.full((), images, dtype=exact, device=rows.device)
        return cls(rows, count, raised, raised if images else torch.ones_like(raised), slice(0, images))


class OwnRows:
    """Rows of this rank: `begin` sends them to the other ranks, `finish` returns the rows of all ranks.

    Args:
        objective: supplies the process group.
        rows_MC: V·N rows; if they are sent, followed by the rows that `unit_embeddings(spare=)` writes after them.
        images: N.
        raised: int32 [2], flags of this rank.
        views: V.
        count: V·N, a scalar on the device; created when needed if not given.
    """

    def __init__(
        self,
        objective: OverRanks,
        rows_MC: Tensor,
        images: int,
        raised: Tensor,
        views: int,
        count: Tensor | None = None,
    ):
        self.objective, self.group = objective, objective.process_group
        self.rows, self.images, self.views = rows_MC, images, views
        self.raised, self.count = raised, count
        self.most = images  # on the rank with the most images
        self.all = rows_MC  # the rows of all ranks
        self._is_sent = False
        self._work: Any = None
        self._told: Tensor | None = None

    def begin(self, asynchronous: bool = False) -> OwnRows:
        """Send the rows if there are other ranks; with `asynchronous` nothing waits for them before `finish`."""
        if self.objective._ranks() > 1:
            self.most = self.objective._most(self.images, self.rows.device)
            if self.rows.requires_grad:
                self.all = ranks.gather_over_ranks(self._filled(), self.group)
            else:
                self.all, self._work = ranks.begin_gather(self._filled(), self.group, asynchronous)
            self._is_sent = True
        return self

    def finish(self) -> Gathered:
        """The rows of all ranks as one view, ready to read; only this rank's rows if they were not sent."""
        if self._work is not None:
            self._work.wait()
        if not self._is_sent:
            return Gathered.of_this_rank(self.rows, self.raised, self.count)
        count, flags = ops.sum_tails_(self.all.detach(), self.objective._ranks())
        self._told = flags[0]
        return Gathered(self.all, count, flags[:2], flags[2:], slice(0))

    def flag(self) -> Tensor:
        """Whether a row is not finite, in training on any rank; no further collective if the rows were sent."""
        if self._told is not None:
            return self._told
        return ranks.largest(self.raised[0], self.group) if self.objective.over_ranks else self.raised[0]

    def require_fit(self) -> None:
        """Raise ValueError if this rank has more images than all ranks agreed on; the other ranks drop the step.

        Call it after the last collective of the step, when no other rank waits for this one any more.
        """
        if self.images > self.most:
            how = "most_images" if self.objective.most_images else "the most on any rank in the first training step"
            raise ValueError(
                f"this rank has {self.images} images, more than {self.most} ({how}); give "
                f"{type(self.objective).__name__}(most_images={self.images}) or more"
            )

    def _filled(self) -> Tensor:
        """The padded rows to send; if there are too many, a message that makes the waiting ranks drop the step."""
        rows = self.views * self.most + tail_rows(self.rows.shape[1])
        if self.images > self.most:
            return refusal(self.rows, rows)
        missing = rows - len(self.rows)
        return nn.functional.pad(self.rows, (0, 0, 0, missing)) if missing else self.rows


class OverRanks(nn.Module):
    """Base class of objectives that run on several ranks.

    Args:
        width: C.
        process_group: ranks that share a batch; None: the default group, or one process if there is none.
        most_images: the most images a rank may have in a training step, the same on all ranks; None: the largest
            number on any rank in the first training step, which the ranks agree on in a collective.

    Attributes:
        measures: whether calls also sum up what `ObjectiveOutput.figures` needs; False, and it may be changed between
            calls. It changes no other result.
    """

    measures = False

    def __init__(self, width: int, process_group: dist.ProcessGroup | None, most_images: int | None):
        super().__init__()
        if most_images is not None:
            require_whole("most_images", most_images)
        require_whole("width", width)
        self.width = int(width)
        self.process_group, self.most_images = process_group, most_images
        self._agreed: dict[int, int] = {}  # number of ranks: the most images on one rank

    @property
    def updates(self) -> Tensor:
        """Number of batches the state was updated with, an int64 scalar, the same on all ranks."""
        return torch.zeros((), dtype=torch.int64)

    @property
    def over_ranks(self) -> bool:
        """Whether several ranks share one batch, which they do in training mode."""
        return self.training and self._ranks() > 1

    def after_step(self, momentum: float | Tensor, skip: Tensor | None = None) -> list[Tensor]:
        """Call after each optimizer step: what a method changes then, nothing for most.

        Args:
            momentum: of the target branch's update after this step; a float64 scalar if on the device.
            skip: a scalar on the device; if it is not 0, the step was dropped, and nothing changes.

        Returns:
            The trained parameters that it changes.
        """
        return []

    def spare(self, views: int, images: int, like: Tensor) -> int:
        """Number of rows that `unit_embeddings` has to append so that the views can be sent; 0 if they are not sent."""
        if not self.over_ranks:
            return 0
        most = self._most(images, like.device)
        return views * (most - images) + tail_rows(like.shape[1]) if images <= most else 0

    def gather(self, own_VNC: Tensor, raised: Tensor) -> Gathered:
        """The rows of all ranks, view by view; in evaluation mode this rank's.

        Args:
            own_VNC: this rank's rows; if they require grad, they receive the gradients of all ranks' losses.
            raised: int32 [2], flags of this rank.

        Raises:
            ValueError: this rank has more images than all ranks agreed on; the other ranks drop the step.
        """
        views, images, width = own_VNC.shape
        if not self.over_ranks:
            return Gathered.of_this_rank(own_VNC, raised)
        most, size = self._most(images, own_VNC.device), self._ranks()
        # Filled on the device: a copy from the host would make the host wait.
        digits = [own_VNC.new_full((1,), images // DIGIT**place % DIGIT) for place in range(TAIL - 2)]
        tail = nn.functional.pad(torch.cat([*digits, raised.to(own_VNC.dtype)]), (0, tail_rows(width) * width - TAIL))
        padded = nn.functional.pad(own_VNC, (0, 0, 0, most - images))
        filled_MC = torch.cat([padded.flatten(0, 1), tail.view(-1, width)])
        sent = OwnRows(self, filled_MC, images, raised, views).begin()
        all_WMC = sent.all.view(size, -1, width)
        tails_WT = all_WMC[:, views * most :].detach().flatten(1)
        counts_W: Any = sum(tails_WT[:, place].to(torch.int64) * DIGIT**place for place in range(TAIL - 2))
        batch = sent.finish()
        sent.require_fit()
        rows_VWNC = all_WMC[:, : views * most].unflatten(1, (views, most)).transpose(0, 1)
        rank = dist.get_rank(self.process_group)
        return replace(
            batch,
            rows=rows_VWNC.reshape(views, size * most, width),
            own=slice(rank * most, rank * most + images),
            is_image=(torch.arange(most, device=counts_W.device) < counts_W[:, None]).flatten(),
        )

    def _ranks(self) -> int:
        return ranks.size(self.process_group)

    def _most(self, images: int, device: torch.device) -> int:
        """The number of images to which every rank pads its rows."""
        if self.most_images is not None:
            return self.most_images
        size = self._ranks()
        if size not in self._agreed:
            if torch.compiler.is_compiling():
                raise RuntimeError(
                    "compiled code cannot find out how many images the other ranks have; give "
                    f"{type(self).__name__}(most_images=...), or run one training step on all ranks before compiling"
                )
            require_no_capture("this number of ranks")
            most = ranks.agree_on_most_images(images, self.updates.to(device), self.process_group)
            if not self.training:  # valid for this batch only: training may use larger ones
                return most
            self._agreed[size] = most
        return self._agreed[size]

    def _lasting(self) -> dict[str, Any]:
        """Attributes that are copied and pickled."""
        return self.__dict__

    def __deepcopy__(self, memo: dict[int, Any]) -> OverRanks:
        copied = memo[id(self)] = self.__class__.__new__(self.__class__)
        memo[id(self.process_group)] = self.process_group  # shared by the copy: a group is not data
        copied.__dict__.update(copy.deepcopy(self._lasting(), memo))
        return copied

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not None:
            warnings.warn(
                f"a process group cannot be pickled: the loaded {type(self).__name__} has the default one; set its "
                "process_group",
                stacklevel=2,
            )
        return {**self._lasting(), "process_group": None}
