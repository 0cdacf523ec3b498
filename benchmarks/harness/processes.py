"""Variants in processes of their own, in which each is the only one; blocks begin and end with the process at rest."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Protocol, TypeVar

from unigrad_fast.runtime import process_group
from unigrad_fast.runtime.errors import DataError, RunStopped, UserError

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
        results([pool.submit(_start, workers[variant]) for variant, pool in pools.items()])
        yield {variant: partial(_run_there, pool, _block) for variant, pool in pools.items()}
        results([pool.submit(_close) for pool in pools.values()])


def results(futures: Sequence[Future]) -> list[Any]:
    """What all of them return, or the error that says most: where one rank fails, the others do for want of it."""
    wait(futures)
    errors = [error for future in futures if (error := future.exception())]
    if errors:
        raise min(errors, key=lambda error: not isinstance(error, UserError | DataError | RunStopped))
    return [future.result() for future in futures]


def require_one_process(command: str) -> None:
    """Raises UserError where the environment says that this is one process of several."""
    if process_group.launch_environment(os.environ).size > 1:
        raise UserError(f"{command} starts its processes itself; start it without torchrun, deepspeed or srun")


def new_process() -> ProcessPoolExecutor:
    """A process that has nothing of this one's memory."""
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))


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
