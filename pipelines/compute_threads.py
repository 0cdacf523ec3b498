"""Threads that compute with one core each."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch

_setting = threading.Lock()


@contextmanager
def one_thread_each(count: int) -> Iterator[ThreadPoolExecutor]:
    """A pool of threads in each of which torch uses one core; other threads keep their setting."""
    ready = threading.Barrier(count)

    def begin() -> None:
        torch.get_num_threads()  # the first call in a thread applies the global setting
        torch.set_num_threads(1)
        ready.wait()

    with ThreadPoolExecutor(count, "augmentation") as pool:
        with _setting:
            before = torch.get_num_threads()
            list(pool.map(lambda _: begin(), range(count)))
            torch.set_num_threads(before)  # threads that start later take the value of the last call
        yield pool
