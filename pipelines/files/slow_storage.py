"""Inspects many files, in threads as soon as the storage turns out to be slow."""

import os
import stat
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from .open_files import time_of_change

THREADS = 8  # hides the latency of network storage
CHUNK = 2048  # files per task of a thread


def spread(function: Callable[[Any], Any], tasks: Sequence[Any]) -> list[Any]:
    """Results of a function, in order; uses threads as soon as the function mostly waits.

    Local storage answers in microseconds, so threads would only contend for the interpreter; network storage is slower.
    """
    results = []
    start, busy = time.perf_counter(), time.thread_time()
    for number, task in enumerate(tasks, 1):
        results.append(function(task))
        passed = time.perf_counter() - start
        if passed > 0.05 and time.thread_time() - busy < passed / 2:
            with ThreadPoolExecutor(THREADS) as pool:
                return results + list(pool.map(function, tasks[number:]))
    return results


def file_states(root: str, names: list[bytes]) -> np.ndarray:
    """Sizes in bytes and times of change of files, int64 [n, 2]; -1, -1 where there is no file."""
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY)  # shorter walks through the file system

    def look(start: int) -> np.ndarray:
        found = []
        for name in names[start : start + CHUNK]:
            try:
                state = os.stat(name, dir_fd=folder)
            except (OSError, ValueError):
                found += (-1, -1)
            else:
                found += (-1, -1) if stat.S_ISDIR(state.st_mode) else (state.st_size, time_of_change(state))
        return np.array(found, np.int64)

    try:
        return np.concatenate(spread(look, range(0, len(names), CHUNK))).reshape(-1, 2)
    finally:
        os.close(folder)
