"""Limits on open files and on processes: raised where that is allowed, said where they are too low."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from unigrad_fast.runtime.errors import UserError

FILES = 64  # that a process of a run opens, with a good margin
FILES_PER_RANK = 4  # for its connections to each of the others
WANTED_FILES = 4096
THREADS = 96  # of a process of a run: torch, DALI, gloo, the loader, the progress bar; on many cores more


def require_limits(ranks: int = 1, threads: int = THREADS) -> None:
    """Raises the limit on open files as far as allowed, and checks it and the limit on processes.

    Args:
        ranks: processes of the run, all of which this one is connected to.
        threads: that this process starts.

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
            f"at most {soft} files may be open at once, and this needs {needed}; type `ulimit -n {WANTED_FILES}`, or "
            "have the administrator raise the limit"
        )
    for left, most, remedy in _processes():
        if left < threads:
            raise UserError(
                f"at most {most} processes and threads may run, of which {max(left, 0)} are left, and this needs "
                f"{threads}; {remedy}"
            )


def explained(error: BaseException) -> str | None:
    """What to say of an error that such a limit caused; None of any other."""
    text = str(error)
    if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE) or "Too many open files" in text:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return f"too many open files: at most {soft} may be open at once; type `ulimit -n {WANTED_FILES}`"
    if "can't start new thread" in text or isinstance(error, BlockingIOError):
        limits = [f"at most {most} may run; {remedy}" for _, most, remedy in _processes()]
        return f"no more processes or threads can be started: {(limits or ['the system is full; end others'])[0]}"
    return None


def _processes() -> Iterator[tuple[int, int, str]]:
    """How many processes and threads may still be started by each limit, the limit, and what to do about it."""
    most, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if most != resource.RLIM_INFINITY and os.geteuid() != 0:  # it does not bind root
        yield most - _threads_of(os.geteuid()), most, f"type `ulimit -u {max(4096, 2 * most)}`, or end other programs"
    for folder in (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/pids")):
        try:
            most, now = (int((folder / f"pids.{name}").read_text(encoding="ascii")) for name in ("max", "current"))
        except (OSError, ValueError):  # none, or "max"
            continue
        yield most - now, most, "start the container or the job with a higher limit on processes (--pids-limit)"


def _threads_of(user: int) -> int:
    total = 0
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if folder.stat().st_uid == user:
                total += len(os.listdir(folder / "task"))
    return total
