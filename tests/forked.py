"""Processes forked from one that has the libraries imported: importing them takes each process seconds."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest import mock

import torch

if os.environ.get("EIGENVECTORS") == "flipped":  # see other_processors.sh; here, as ranks import this too
    import flipped_eigenvectors  # noqa: F401

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",  # threads that spin keep the other processes from computing
    "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests"))),
    "COLUMNS": "120",
}
# A forked process cannot use a GPU that the importing process has asked about.
CONTEXT = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
CONTEXT.set_forkserver_preload(["preloaded"])


def start(
    function: Callable, *arguments: object, environment: Mapping[str, str] | None = None, has_children: bool = False
) -> BaseProcess:
    """A process that calls a module-level function with this process's variables, those above and some more.

    Args:
        has_children: it may start processes; it is to be ended by whoever started it, as it does not end with this one.
    """
    with mock.patch.dict(os.environ, ENVIRONMENT):
        variables = {**os.environ, **(environment or {})}
        process = CONTEXT.Process(target=_run, args=(variables, function, arguments), daemon=not has_children)
        process.start()
    return process


def new_pool() -> ProcessPoolExecutor:
    """A pool of one process with this process's variables and those above."""
    with mock.patch.dict(os.environ, ENVIRONMENT):
        if CONTEXT.get_start_method() == "forkserver":
            forkserver.ensure_running()  # else the pool would start it later, with other variables
        return ProcessPoolExecutor(1, CONTEXT, initializer=_take, initargs=(dict(os.environ),))


def _run(variables: dict[str, str], function: Callable, arguments: tuple) -> None:
    _take(variables)
    function(*arguments)


def _take(variables: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(variables)
