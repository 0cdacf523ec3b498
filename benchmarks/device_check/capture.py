"""CUDA graphs for the checks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")


def captured(
    run: Callable[[], Result], times: int = 1, error_mode: str = "global"
) -> tuple[torch.cuda.CUDAGraph, Result]:
    """A CUDA graph of a function, and the result that each replay overwrites; the function first runs once uncaptured.

    Args:
        run: the function; its first run may compile, and allocate persistent memory.
        times: number of runs in the graph.
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
