"""Runs a DALI pipeline over the images of each step, and survives images that break it."""

from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .background import in_background
from .errors import DataError
from .reading.source import Source
from .reading.supply import Supply

if TYPE_CHECKING:
    from nvidia.dali.pipeline import Pipeline

BREAKS = 64  # of a pipeline at one step before the loader gives up


class Stream:
    """A pipeline's outputs, step by step; if an image breaks the pipeline, it continues without that image.

    Args:
        source: provides the supply of each step.
        build: builds a pipeline from the function that feeds it; its last output is the images' shapes.
        feed: turns a supply into a pipeline's input.
        device_id: index of the GPU; None for the CPU.
        ahead: steps whose input a thread prepares in advance; with 0 the pipeline's own thread prepares it.
    """

    def __init__(
        self,
        source: Source,
        build: Callable[[Callable[[Any], list]], "Pipeline"],
        feed: Callable[[Supply], list],
        device_id: int | None,
        ahead: int = 0,
    ) -> None:
        self.source, self.build, self.feed, self.device_id, self.ahead = source, build, feed, device_id, ahead

    def steps(self, start: int) -> Generator[tuple[Supply, tuple], None, None]:
        """Supplies and outputs, without the shapes, starting at a step."""
        step, last, broken = start, self.source.last, 0
        while last is None or step < last:
            for supply, outputs in self._until_it_breaks(step):
                self.source.done(step)
                yield supply, outputs
                step, broken = step + 1, 0
            broken += 1
            if broken > BREAKS:
                raise DataError(
                    f"step {step} was repeated {BREAKS} times, each time because of other unreadable images; check "
                    "whether something is changing the files"
                )

    def _until_it_breaks(self, start: int) -> Generator[tuple[Supply, tuple], None, None]:
        inputs = in_background(lambda stopped: self._inputs(start, stopped), self.ahead) if self.ahead else None
        with closing(inputs or self._inputs(start)) as made:
            yield from self._outputs(made)

    def _inputs(
        self, step: int, stopped: Callable[[], bool] | None = None
    ) -> Generator[tuple[Supply, list], None, None]:
        """Supplies starting at a step, and the pipeline's input from each."""
        damaged = self.source.damaged
        if stopped is not None:
            self.source.stopped = stopped
        while (supply := self.source.take(step)) is not None:
            supply.data = [damaged.prepared(image, data) for image, data in zip(supply.index, supply.data, strict=True)]
            yield supply, self.feed(supply)
            step += 1

    def _outputs(self, inputs: Iterator[tuple[Supply, list]]) -> Generator[tuple[Supply, tuple], None, None]:
        waiting: deque[Supply] = deque()  # inside the pipeline
        damaged = self.source.damaged

        def source(info: Any) -> list:
            supply, arrays = next(inputs)
            waiting.append(supply)
            return arrays

        pipeline = self.build(source)
        stream = None if self.device_id is None else torch.cuda.current_stream(self.device_id)
        while True:
            try:
                *outputs, shapes = pipeline.run(stream)
                found = damaged.find_resized(waiting[0], np.asarray(shapes.as_tensor()))
            except StopIteration:
                return
            except RuntimeError:
                # With prefetching the failure may belong to a batch ahead of the one asked for.
                found = damaged.find(waiting, self.device_id)
                if not found:
                    raise
            if found:
                return
            yield waiting.popleft(), tuple(outputs)
