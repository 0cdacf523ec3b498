"""Memory: what a piece of code takes at its peak through torch's allocators, and what this process holds."""

from __future__ import annotations

import ctypes
import itertools
import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

MEASURED = "measured"


def peak_bytes(run: Callable[[], object], release: Callable[[], object], device: torch.device, warmup: int = 1) -> int:
    """The most bytes that a run holds at a time beyond what was held before it, custom operators included.

    On the CPU it is the sum of the allocator's own reports, so what oneDNN or MKL take for themselves is not seen.

    Args:
        run: the code.
        release: lets go of what a run leaves behind, so that it counts.
        device: where the memory is.
        warmup: runs before the measured one. The allocator knows of a block that it frees only when it was taken
            here: what a run replaces must be from one of these.
    """
    if device.type == "cuda":
        for _ in range(warmup):
            run()
        release()
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it writes of its start and end, and of missing GPUs
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        for _ in range(warmup):
            run()
        release()
        with record_function(MEASURED):
            run()
    # The profiler's tables add up each operator's balance; only the raw events know the order.
    events = profiler.profiler.kineto_results.events()
    start = next(event.start_ns() for event in events if event.name() == MEASURED)
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    return max(itertools.accumulate((change for time, change in changes if time >= start), initial=0))


def process_bytes(field: str) -> int:
    """Bytes of this process by Linux's count: "VmRSS" is what it holds, "VmHWM" the most that it held.

    `ru_maxrss` would also know the process that this one was forked from.
    """
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status[field].split()[0]) * 1024


def give_back_free_memory() -> None:
    """Returns memory that is free and was kept for later to the system."""
    ctypes.CDLL(None).malloc_trim(0)


def free_bytes() -> int:
    """Bytes that programs may still take: of the GPU, or of the host by Linux's count."""
    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[0]
    status = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(status["MemAvailable"].split()[0]) * 1024
