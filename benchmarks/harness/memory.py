"""Memory: peak usage of a piece of code through torch's allocators, and memory of this process."""

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
    """Peak bytes that a run holds beyond those held before it, including custom operators.

    On the CPU this sums the allocator's own reports, so memory that oneDNN or MKL allocate themselves is not included.

    Args:
        run: the code.
        release: frees what a run leaves behind, so that the next run's allocations count.
        device: where the memory is.
        warmup: runs before the measured one. The profiler attributes a freed block only if it saw the allocation, so
            anything that the measured run replaces must have been allocated by one of these.
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
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise it logs its start and end, and missing GPUs
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        for _ in range(warmup):
            run()
        release()
        with record_function(MEASURED):
            run()
    # The profiler's tables sum up each operator's balance; only the raw events have the order.
    events = profiler.profiler.kineto_results.events()
    start = next(event.start_ns() for event in events if event.name() == MEASURED)
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    return max(itertools.accumulate((change for time, change in changes if time >= start), initial=0))


def process_bytes(field: str) -> int:
    """Memory of this process in bytes, from Linux: "VmRSS" is the current amount, "VmHWM" the peak.

    `ru_maxrss` would include the process that this one was forked from.
    """
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status[field].split()[0]) * 1024


def give_back_free_memory() -> None:
    """Return free memory that the allocator holds to the system."""
    ctypes.CDLL(None).malloc_trim(0)


def free_bytes() -> int:
    """Free memory in bytes, of the GPU or, without one, of the host as reported by Linux."""
    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[0]
    status = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(status["MemAvailable"].split()[0]) * 1024
