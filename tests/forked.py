"""Processes forked from one that has the libraries imported: importing them takes each process seconds."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest import mock

import torch

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests"))),
    "COLUMNS": "120",
}
# A forked process cannot use a GPU that the importing process has asked about.
CONTEXT = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
CONTEXT.set_forkserver_preload(["preloaded"])


def start(function: Callable, *arguments: object, environment: Mapping[str, str] | None = None) -> BaseProcess:
    """A process that calls a module-level function with this process's variables, those above and some more."""
    with mock.patch.dict(os.environ, ENVIRONMENT):
        variables = {**os.environ, **(environment or {})}
        process = CONTEXT.Process(target=_run, args=(variables, function, arguments), daemon=True)
        process.start()
    return process


def _run(variables: dict[str, str], function: Callable, arguments: tuple) -> None:
    os.environ.clear()
    os.environ.update(variables)
    function(*arguments)
