"""The folder of a run: who may write to it."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager

from unigrad_fast.checkpoints import files
from unigrad_fast.config import Config, to_yaml
from unigrad_fast.runtime.errors import UserError
from unigrad_fast.runtime.process_group import World, on_all_ranks
from unigrad_fast.runtime.whole_file import write_whole

LOCK = ".lock"


@contextmanager
def occupied(config: Config, world: World) -> Iterator[None]:
    """Makes the run folder, keeps other processes off it while inside, and writes config.yaml.

    Raises:
        UserError: on all ranks, when another process writes to it.
        OSError: on all ranks, when it cannot be written.
    """
    lock = on_all_ranks(lambda: _occupy(config) if world.rank == 0 else None)
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)


def _occupy(config: Config) -> int:
    """The descriptor of the lock, which the system gives back however this process ends."""
    run = config.output
    run.mkdir(parents=True, exist_ok=True)
    lock = os.open(run / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            os.close(lock)
            raise UserError(
                f"output = {run}: another process trains in this folder; end it first, or give another folder"
            ) from None
        # A file system without locks: nothing to be done about it.
    files.remove_leftovers(run)
    write_whole(run / "config.yaml", to_yaml(config).encode())
    return lock
