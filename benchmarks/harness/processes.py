"""Runs each variant in its own process; blocks of work begin and end with the process idle."""

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

QUIET, WORK = 0.3, 0.01  # idle means: in so many seconds, no more than so much processor time
MOST_REST = 60.0  # seconds to wait for a process to become idle

Variant = TypeVar("Variant")


class Worker(Protocol):
    """The work of a process: blocks, until it is closed."""

    def block(self, *arguments: Any) -> Any: ...

    def close(self) -> None: ...


@contextmanager
def in_processes(
    workers: Mapping[Variant, Callable[[], Worker]], new_process: Callable[[], ProcessPoolExecutor]
) -> Iterator[dict[Variant, Callable[..., Any]]]:
    """Make each worker in its own process, which ends with the context.

    Args:
        workers: by variant, a picklable function that makes the worker in its process.
        new_process: starts a process.

    Returns:
        By variant, a function that runs a block in its process and returns the result.
    """
    with ExitStack() as stack:
        pools = {variant: stack.enter_context(new_process()) for variant in workers}
        results([pool.submit(_start, workers[variant]) for variant, pool in pools.items()])
        yield {variant: partial(_run_there, pool, _block) for variant, pool in pools.items()}
        results([pool.submit(_close) for pool in pools.values()])


def results(futures: Sequence[Future]) -> list[Any]:
    """The results of all futures. On errors raises the most telling one, since other ranks fail as a consequence."""
    wait(futures)
    errors = [error for future in futures if (error := future.exception())]
    if errors:
        raise min(errors, key=lambda error: not isinstance(error, UserError | DataError | RunStopped))
    return [future.result() for future in futures]


def require_one_process(command: str, why: str = "starts its own processes") -> None:
    """Raises UserError if the environment says that this is one of several processes."""
    if process_group.launch_environment(os.environ).size > 1:
        raise UserError(f"{command} {why}; run it without torchrun, deepspeed or srun")


def new_process() -> ProcessPoolExecutor:
    """A process that shares no memory with this one."""
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
    """Without this, a pool's process would outlive a killed parent and keep its memory."""
    multiprocessing.parent_process().join()
    os._exit(1)


def cpu_seconds() -> float:
    """Processor time of this process and its running children."""
    children = multiprocessing.active_children()
    # Linux's ID of the clock for the processor time of a process with all its threads
    clocks = (~child.pid << 3 | 2 for child in children)
    return time.process_time() + sum(map(time.clock_gettime, clocks))


def rest() -> None:
    """Wait until this process and its children are idle, for example because all queues are full."""
    end = time.monotonic() + MOST_REST
    while time.monotonic() < end:
        before = cpu_seconds()
        time.sleep(QUIET)
        if cpu_seconds() - before <= WORK:
            return
    warnings.warn(
        f"a variant is still busy {MOST_REST:g} s after its block and may slow down the next one", stacklevel=2
    )
