"""`unigrad-fast` in a process of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TypeAlias

from forked import ENVIRONMENT, start
from thin import thin

Inside: TypeAlias = Callable[[], AbstractContextManager]


class CommandProcess:
    """A command that has been started.

    Args:
        arguments: what follows `unigrad-fast`.
        environment: what a launcher sets beside the test's own variables.
        is_thin: the encoder is thin.
        inside: makers of what the command runs inside of, functions of modules.
    """

    def __init__(
        self,
        *arguments: object,
        environment: dict[str, str] | None = None,
        is_thin: bool = False,
        inside: Sequence[Inside] = (),
    ):
        self.args = tuple(map(str, arguments))
        self._folder = tempfile.TemporaryDirectory(prefix="command-")
        self._said = [Path(self._folder.name, name) for name in ("stdout", "stderr")]
        self._process = start(_run, self.args, self._said, is_thin, inside, environment=environment)

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


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start_ranks(count: int, *arguments: object, **settings) -> list[CommandProcess]:
    """A command on some ranks, with the variables that torchrun would set."""
    shared = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    shared["TORCHELASTIC_RUN_ID"] = "none"
    environments = [{**shared, "RANK": rank, "LOCAL_RANK": rank} if count > 1 else {} for rank in range(count)]
    texts = [{name: str(value) for name, value in each.items()} for each in environments]
    return [CommandProcess(*arguments, environment=each, **settings) for each in texts]


def command_on_two_ranks(*arguments: object, is_thin: bool = False) -> subprocess.CompletedProcess:
    """The higher exit status, and what both printed."""
    results = [process.end() for process in start_ranks(2, *arguments, is_thin=is_thin)]
    said = ["".join(getattr(result, stream) for result in results) for stream in ("stdout", "stderr")]
    return subprocess.CompletedProcess(arguments, max(result.returncode for result in results), *said)


def command(*arguments, launcher: tuple[str, ...] | None = None, is_thin: bool = False) -> subprocess.CompletedProcess:
    """The command's result; with a launcher, or none (`()`), from a new interpreter."""
    if launcher is None:
        return CommandProcess(*arguments, is_thin=is_thin).end()
    start = [sys.executable, "-m", *launcher, "thin" if is_thin else "unigrad_fast"]
    environment = {**os.environ, **ENVIRONMENT}
    return subprocess.run([*start, *map(str, arguments)], env=environment, capture_output=True, text=True, timeout=300)


def _run(arguments: tuple[str, ...], files: list[Path], is_thin: bool, inside: Sequence[Inside]) -> None:
    for stream, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), stream)
    if terminal := os.environ.get("PYTHONIOENCODING"):  # which an interpreter reads as it starts
        encoding, _, errors = terminal.partition(":")
        for written in (sys.stdout, sys.stderr):
            written.reconfigure(encoding=encoding, errors=errors or "strict")
    from unigrad_fast.cli import main

    with ExitStack() as stack:
        for enter in (*([thin] if is_thin else []), *inside):
            stack.enter_context(enter())
        sys.exit(main(arguments))
