"""`unigrad-fast` in a process of its own, forked from one that has the libraries imported: that takes seconds."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
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


class CommandProcess:
    """A command that has been started.

    Args:
        arguments: what follows `unigrad-fast`.
        environment: what a launcher sets beside the test's own variables.
    """

    def __init__(self, *arguments: object, environment: dict[str, str] | None = None):
        self.args = tuple(map(str, arguments))
        self._folder = tempfile.TemporaryDirectory(prefix="command-")
        self._said = [Path(self._folder.name, name) for name in ("stdout", "stderr")]
        with mock.patch.dict(os.environ, ENVIRONMENT):
            variables = {**os.environ, **(environment or {})}
            self._process = CONTEXT.Process(target=_run, args=(self.args, variables, self._said), daemon=True)
            self._process.start()

    def has_ended(self) -> bool:
        return self._process.exitcode is not None

    def signal(self, number: int) -> None:
        os.kill(self._process.pid, number)

    def end(self, timeout: float = 300.0) -> subprocess.CompletedProcess:
        """Its exit status and what it printed, once it has ended."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        said = [file.read_text() for file in self._said]
        return subprocess.CompletedProcess(self.args, self._process.exitcode, *said)


def command(*arguments, launcher: tuple[str, ...] | None = None) -> subprocess.CompletedProcess:
    """The command's result; with a launcher, or none (`()`), from a new interpreter."""
    if launcher is None:
        return CommandProcess(*arguments).end()
    start = [sys.executable, "-m", *launcher, "unigrad_fast"]
    environment = {**os.environ, **ENVIRONMENT}
    return subprocess.run([*start, *map(str, arguments)], env=environment, capture_output=True, text=True, timeout=300)


def _run(arguments: tuple[str, ...], variables: dict[str, str], files: list[Path]) -> None:
    for stream, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), stream)
    os.environ.clear()
    os.environ.update(variables)
    from unigrad_fast.cli import main

    sys.exit(main(arguments))
