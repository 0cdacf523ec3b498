"""Limits on open files and processes: raised if allowed, reported if too low."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from unigrad_fast.runtime.errors import UserError

FILES = 64  # files that a process of a run opens, with a good margin
FILES_PER_RANK = 4  # connections to each of the other ranks
WANTED_FILES = 4096
THREADS = 96  # of a process of a run: torch, DALI, gloo, the loader, the progress bar; more on many cores


def require_limits(ranks: int = 1) -> None:
    """Raises the limit on open files as far as allowed, then checks it and the limit on processes.

    Args:
        ranks: processes of the run; this one connects to all of them.

    Raises:
        UserError: a limit is too low for a run.
    """
    needed = FILES + FILES_PER_RANK * ranks
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < WANTED_FILES:
        wanted = WANTED_FILES if hard == resource.RLIM_INFINITY else min(hard, WANTED_FILES)
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    if 0 <= soft < needed:
        raise UserError(
            f"the limit on open files is {soft}, but this needs {needed}; type `ulimit -n {WANTED_FILES}`, or "
            "ask the administrator to raise the limit"
        )
    for left, most, remedy in _processes():
        if left < THREADS:
            raise UserError(
                f"the limit on processes and threads is {most}; {max(left, 0)} are left, but this needs {THREADS}; "
                f"{remedy}"
            )


def explained(error: BaseException) -> str | None:
    """The message for an error that such a limit caused; None for any other error."""
    text = str(error)
    if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE) or "Too many open files" in text:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return f"too many open files: the limit is {soft}; type `ulimit -n {WANTED_FILES}`"
    if "can't start new thread" in text or isinstance(error, BlockingIOError):
        limits = [f"the limit is {most}; {remedy}" for _, most, remedy in _processes()]
        return f"no more processes or threads can be started: {(limits or ['end other programs'])[0]}"
    return None


def _processes() -> Iterator[tuple[int, int, str]]:
    """For each limit: how many processes and threads may still be started, the limit itself, and the remedy."""
    most, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if most != resource.RLIM_INFINITY and os.geteuid() != 0:  # root is exempt
        yield most - _threads_of(os.geteuid()), most, f"type `ulimit -u {max(4096, 2 * most)}`, or end other programs"
    for folder in (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/pids")):
        try:
            most, now = (int((folder / f"pids.{name}").read_text(encoding="ascii")) for name in ("max", "current"))
        except (OSError, ValueError):  # no such file, or "max"
            continue
        yield most - now, most, "start the container or the job with a higher limit on processes (--pids-limit)"


def _threads_of(user: int) -> int:
    total = 0
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if folder.stat().st_uid == user:
                total += len(os.listdir(folder / "task"))
    return total
