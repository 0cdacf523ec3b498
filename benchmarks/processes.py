"""Variants in processes of their own, in which each is the only one; blocks begin and end with the process at rest."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Protocol, TypeVar

QUIET, WORK = 0.3, 0.01  # seconds that count as rest, with no more processor time than this
MOST_REST = 60.0  # seconds that a process may take to come to rest

Variant = TypeVar("Variant")


class Worker(Protocol):
    """What a process does: blocks, until it is closed."""

    def block(self, *arguments: Any) -> Any: ...

    def close(self) -> None: ...


@contextmanager
def in_processes(
    workers: Mapping[Variant, Callable[[], Worker]], new_process: Callable[[], ProcessPoolExecutor]
) -> Iterator[dict[Variant, Callable[..., Any]]]:
    """Makes each worker in a process of its own, which ends with the context.

    Args:
        workers: by variant, what makes the worker there; picklable.
        new_process: starts a process.

    Returns:
        By variant, what runs a block there and returns its result.
    """
    with ExitStack() as stack:
        pools = {variant: stack.enter_context(new_process()) for variant in workers}
        for start in [pool.submit(_start, workers[variant]) for variant, pool in pools.items()]:
            start.result()
        yield {variant: partial(_run_there, pool, _block) for variant, pool in pools.items()}
        for pool in pools.values():
            _run_there(pool, _close)


def _run_there(pool: ProcessPoolExecutor, function: Callable[..., Any], *arguments: Any) -> Any:
    return pool.submit(function, *arguments).result()


_worker: Worker  # of this process


def _start(make: Callable[[], Worker]) -> None:
    global _worker
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker = make()


def _block(*arguments: Any) -> Any:
    return _worker.block(*arguments)


def _close() -> None:
    _worker.close()


def _end_with_parent() -> None:
    """A process of a pool would outlive a parent that is killed, and keep its memory."""
    multiprocessing.parent_process().join()
    os._exit(1)


def cpu_seconds() -> float:
    """Processor time of this process and its living children."""
    children = multiprocessing.active_children()
    return time.process_time() + sum(time.clock_gettime(_cpu_clock(child.pid)) for child in children)


def _cpu_clock(pid: int) -> int:
    """Linux's clock of the processor time of a process and all its threads, for `clock_gettime`."""
    return ~pid << 3 | 2


def rest() -> None:
    """Returns when this process and its children compute no more, say because all queues are full."""
    end = time.monotonic() + MOST_REST
    while time.monotonic() < end:
        before = cpu_seconds()
        time.sleep(QUIET)
        if cpu_seconds() - before <= WORK:
            return
    warnings.warn(f"a variant still computes {MOST_REST:g} s after its block, beside the next one", stacklevel=2)
