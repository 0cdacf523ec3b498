"""The target branch on a separate CUDA stream, concurrent with the online branch's forward pass.

Neither branch may start collectives meanwhile: NCCL runs a group's collectives in the order in which the host issues
them, so with synchronised batch norm the online branch would wait for all of the target's, and nothing would overlap.
That combination is refused. Batch norm's running buffers, the target's weights and everything the optimizer updates
belong to the current stream; the target's stream waits for it before it starts, and the objective waits for the target.

The views are DALI's memory, of which torch's `record_stream` knows nothing. DALI takes the last reference to a view as
the sign that all work that reads it is queued: it waits for what is queued on the device by then, and uses the memory
again. So a view is read in this order: DALI's event, for which the current stream waits in `from_dlpack`; the target's
stream waits for the current one and reads; the current one waits for the target's; only now are the views let go of.
That holds for memory of torch's too, which is used again in the order of the stream that it was made for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from unigrad_fast import config
from unigrad_fast.runtime.errors import UserError
from unigrad_fast.runtime.process_group import World


class TargetStream:
    """The stream for the target branch: a separate one with `engine.target_stream`, else the current one.

    Raises:
        UserError: it is requested without a GPU, or with batch norm synchronised over several ranks.
    """

    def __init__(self, engine: config.Engine, model: config.Model, world: World):
        self._stream: torch.cuda.Stream | None = None
        self._read: list[Tensor] = []  # by the target, until the current stream waits for it
        if not engine.target_stream:
            return
        if world.device.type != "cuda":
            raise UserError("engine.target_stream = true: needs a GPU, and this run has none; leave it out")
        if world.size > 1 and model.sync_batch_norm:
            raise UserError(
                f"engine.target_stream = true: on {world.size} ranks the batch norms of both branches exchange "
                "statistics, so the branches cannot overlap; leave it out, or set model.sync_batch_norm false"
            )
        self._stream = torch.cuda.Stream(world.device)

    @contextmanager
    def beside(self, views: Sequence[Tensor]) -> Iterator[None]:
        """Queue the work inside on the stream; of what it reads, the caller may let go of `views` before `join`."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        self._read = list(views)
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Make later work on the current stream wait for it; the host does not wait."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
            self._read.clear()
