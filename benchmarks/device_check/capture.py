"""CUDA graphs of what is checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")


def captured(
    run: Callable[[], Result], times: int = 1, error_mode: str = "global"
) -> tuple[torch.cuda.CUDAGraph, Result]:
    """A graph of a function, and the result that each replay writes anew; it runs once before, on a stream aside.

    Args:
        run: compiles, and makes what is kept from step to step, when it runs for the first time.
        times: runs in the graph.
        error_mode: `capture_error_mode` of `torch.cuda.graph`.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=error_mode):
        for _ in range(times):
            result = run()
    return graph, result
