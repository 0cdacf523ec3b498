"""The target branch on a stream of its own, where a GPU runs it beside the online branch's forward pass.

What it requires: neither branch may meet other ranks meanwhile. NCCL takes a group's collectives in the order in which
the host gives them, so that with synchronised batch norm the online branch would wait for all of the target's, and
nothing would overlap; that is refused. Batch norm's running buffers, the target's weights and all that the optimizer
moves belong to the current stream, which the target's waits for before it begins; the objective waits for the target.
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
    """Where the target branch runs: on a stream of its own with `engine.target_stream`, else on the current one.

    Raises:
        UserError: it is asked for without a GPU, or with batch norm over several ranks.
    """

    def __init__(self, engine: config.Engine, model: config.Model, world: World):
        self._stream: torch.cuda.Stream | None = None
        if not engine.target_stream:
            return
        if world.device.type != "cuda":
            raise UserError("engine.target_stream = true: streams are a GPU's, and this run has none; leave it out")
        if world.size > 1 and model.sync_batch_norm:
            raise UserError(
                f"engine.target_stream = true: with {world.size} ranks batch norm exchanges statistics, in one order "
                "for both branches; leave it out, or set model.sync_batch_norm false"
            )
        self._stream = torch.cuda.Stream(world.device)

    @contextmanager
    def beside(self, views: Sequence[Tensor]) -> Iterator[None]:
        """While inside, work goes to the stream; it reads `views`, and nothing else that is let go before `join`."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield
        for view in views:
            view.record_stream(self._stream)

    def join(self) -> None:
        """What follows on the current stream waits for it; the host does not."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
