"""Runs a DALI pipeline over the images of each step, and survives images that break it."""

from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .background import in_background
from .errors import DataError
from .reading.source import Source
from .reading.supply import Supply

if TYPE_CHECKING:
    from nvidia.dali.pipeline import Pipeline

    Build = Callable[[Callable[[Any], list]], Pipeline]

BREAKS = 64  # of a pipeline at one step before the loader gives up


def run_pipeline(
    source: Source,
    build: "Build",
    feed: Callable[[Supply], list],
    device_id: int | None,
    start: int = 0,
    ahead: int = 0,
) -> Generator[tuple[Supply, tuple], None, None]:
    """Supplies and outputs of a pipeline, step by step; if an image breaks it, it continues without that image.

    Args:
        source: provides the supply of each step.
        build: builds a pipeline from the function that feeds it; its last output, the images' shapes, is not returned.
        feed: turns a supply into a pipeline's input.
        device_id: index of the GPU; None for the CPU.
        start: the first step.
        ahead: steps whose input a thread prepares in advance; with 0 the pipeline's own thread prepares it.
    """

    def inputs(step: int, stopped: Callable[[], bool] | None = None) -> Generator[tuple[Supply, list], None, None]:
        """Supplies starting at a step, and the pipeline's input from each."""
        if stopped is not None:
            source.stopped = stopped
        prepared = source.damaged.prepared
        while (supply := source.take(step)) is not None:
            supply.data = [prepared(image, data) for image, data in zip(supply.index, supply.data, strict=True)]
            yield supply, feed(supply)
            step += 1

    step, broken = start, 0
    while source.last is None or step < source.last:
        with closing(in_background(partial(inputs, step), ahead) if ahead else inputs(step)) as made:
            for supply, outputs in _until_it_breaks(source, build, made, device_id):
                source.done(step)
                yield supply, outputs
                step, broken = step + 1, 0
        broken += 1
        if broken > BREAKS:
            raise DataError(
                f"step {step} was repeated {BREAKS} times, each time because of other unreadable images; check "
                "whether something is changing the files"
            )


def _until_it_breaks(
    source: Source, build: "Build", inputs: Iterator[tuple[Supply, list]], device_id: int | None
) -> Generator[tuple[Supply, tuple], None, None]:
    waiting: deque[Supply] = deque()  # inside the pipeline
    damaged = source.damaged

    def next_input(info: Any) -> list:
        supply, arrays = next(inputs)
        waiting.append(supply)
        return arrays

    pipeline = build(next_input)
    stream = None if device_id is None else torch.cuda.current_stream(device_id)
    while True:
        try:
            *outputs, shapes = pipeline.run(stream)
            found = damaged.find_resized(waiting[0], np.asarray(shapes.as_tensor()))
        except StopIteration:
            return
        except RuntimeError:
            # With prefetching the failure may belong to a batch ahead of the one asked for.
            found = damaged.find(waiting, device_id)
            if not found:
                raise
        if found:
            return
        yield waiting.popleft(), tuple(outputs)
