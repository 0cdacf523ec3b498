"""Low limits on open files and processes are raised where that is allowed, and else said before anything begins."""

from __future__ import annotations

import errno
import os
import resource
import sys
from collections.abc import Callable

import pytest
from forked import start

from unigrad_fast import cli
from unigrad_fast.runtime import limits
from unigrad_fast.runtime.errors import UserError


def in_a_process(function: Callable, *arguments: object) -> int:
    process = start(function, *arguments)
    process.join(300)
    return process.exitcode


def scan_with_few_files(folder: str, said: str) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
    sys.stderr = open(said, "w")  # noqa: SIM115
    status = cli.main(["data", "scan", folder])
    sys.stderr.flush()
    os._exit(status)


def test_a_limit_on_open_files_that_is_too_low_is_a_users_error(tmp_path):
    assert in_a_process(scan_with_few_files, str(tmp_path), str(tmp_path / "stderr")) == 2
    (line,) = (tmp_path / "stderr").read_text().splitlines()
    assert line.startswith("error: the limit on open files is 40, but this needs 68; type `ulimit -n 4096`")


def take_what_is_allowed() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (40, 2000))
    limits.require_limits()
    os._exit(resource.getrlimit(resource.RLIMIT_NOFILE) == (2000, 2000))


def test_a_limit_on_open_files_is_raised_as_far_as_allowed():
    assert in_a_process(take_what_is_allowed) == 1


def test_too_few_processes_are_a_users_error(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 4_000_000_000)  # whom nothing belongs to
    monkeypatch.setattr(resource, "getrlimit", lambda what: (30, 30) if what == resource.RLIMIT_NPROC else (-1, -1))
    with pytest.raises(UserError, match="the limit on processes and threads is 30; 30 are left") as raised:
        limits.require_limits()
    assert "type `ulimit -u 4096`" in str(raised.value)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.EMFILE, os.strerror(errno.EMFILE), "a.jpg"), "error: too many open files: the limit is "),
        (ImportError("filesystem error: Too many open files"), "error: too many open files: the limit is "),
        (RuntimeError("can't start new thread"), "error: no more processes or threads can be started: "),
        (BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)), "error: no more processes or threads can be "),
    ],
)
def test_a_limit_that_is_met_later_is_named(error, said, capsys, monkeypatch):
    def fail(words: list[str]) -> None:
        raise error

    monkeypatch.setattr(cli, "run", fail)
    assert cli.main(["doctor"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(said)
