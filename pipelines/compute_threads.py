"""Threads that compute with one core each."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch

_setting = threading.Lock()


@contextmanager
def one_thread_each(count: int) -> Iterator[ThreadPoolExecutor]:
    """Threads in each of which torch computes with one core; other threads keep what they have."""
    ready = threading.Barrier(count)

    def begin() -> None:
        torch.get_num_threads()  # the first call in a thread sets what is set for all
        torch.set_num_threads(1)
        ready.wait()

    with ThreadPoolExecutor(count, "augmentation") as pool:
        with _setting:
            before = torch.get_num_threads()
            list(pool.map(lambda _: begin(), range(count)))
            torch.set_num_threads(before)  # what the last call set is also what threads that begin later take
        yield pool
