"""The folder of a run: which one it is, who may write to it, and what an attempt before has left there."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from unigrad_fast.checkpoints import files
from unigrad_fast.config import Config, to_yaml
from unigrad_fast.runtime.errors import UserError
from unigrad_fast.runtime.outputs import problem_of_run_folder
from unigrad_fast.runtime.process_group import World, gather, on_all_ranks
from unigrad_fast.runtime.whole_file import write_whole
from unigrad_fast.runtime.wording import byte_size

LOCK = ".lock"
OF_AN_ATTEMPT = ("metrics.jsonl", "summary.json", "curves.png", "curves.svg", "bad_images.jsonl")
EVENTS = "tensorboard/events.out.tfevents.*"


@dataclass(frozen=True)
class _Place:
    """A run folder in use: the descriptor of its lock, and what was not there before, the innermost first."""

    run: Path
    lock: int
    made: list[Path]

    def leave(self) -> None:
        """Give it back; one in which nothing was written is as it was before, or gone."""
        if not (self.run / "config.yaml").exists():
            with suppress(OSError):
                for path in self.made:
                    path.unlink() if path.name == LOCK else path.rmdir()
        os.close(self.lock)


@contextmanager
def occupied(config: Config, world: World, numbered: bool = False) -> Iterator[Config]:
    """Makes the run folder, keeps other processes off it while inside, and yields the configuration that names it.

    Args:
        numbered: where there is something of the folder's name already, take NAME-2, NAME-3, ...

    Raises:
        UserError: on all ranks, when another process writes to it, or it holds what a run would replace.
        OSError: on all ranks, when it cannot be written.
    """
    place = on_all_ranks(lambda: _occupy(config.output, numbered) if world.rank == 0 else None)
    try:
        yield config.model_copy(update={"output": gather(place and place.run)[0]})
    finally:
        if place is not None:
            place.leave()


def begin(config: Config, world: World, goes_on: bool) -> bool:
    """Writes config.yaml; whether an attempt before it had begun, whose files are cleared away but for log.txt.

    All ranks call this together, inside of `occupied`.

    Args:
        goes_on: the run goes on from a checkpoint, and so do its files.

    Raises:
        UserError: on all ranks, when a checkpoint has come to a run that has none.
        OSError: on all ranks, when the folder cannot be written.
    """
    return gather(on_all_ranks(lambda: _begin(config, goes_on) if world.rank == 0 else False))[0]


def little_space(run: Path, checkpoint: int, keep: int) -> str | None:
    """What to warn of where less than two checkpoints of so many bytes fit on the disk; None when more do."""
    free = shutil.disk_usage(run).free
    if free >= 2 * checkpoint:
        return None
    return (
        f"little space: {byte_size(free)} are free on the disk of {run}, a checkpoint takes {byte_size(checkpoint)}, "
        f"and checkpoint.keep = {keep} has up to {keep + 1} of them there; free disk space, or the run may stop"
    )


def _occupy(wanted: Path, numbered: bool) -> _Place:
    """The folder with a lock, which the system takes back however this process ends."""
    if not numbered and (problem := problem_of_run_folder(wanted)):
        raise UserError(f"output = {wanted}: {problem}")
    absent = [folder for folder in (wanted, *wanted.parents) if not folder.exists()]
    run = _make_numbered(wanted) if numbered else wanted
    run.mkdir(parents=True, exist_ok=True)
    made = [run, *(folder for folder in absent if folder != wanted)] if numbered else absent
    if not (run / LOCK).exists():
        made = [run / LOCK, *made]
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
    return _Place(run, lock, made)


def _make_numbered(wanted: Path) -> Path:
    """The first of NAME, NAME-2, NAME-3, ... that is not there, made; of several that ask at once each gets its own."""
    wanted.parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        run = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        with suppress(FileExistsError):
            run.mkdir()
            return run
    raise AssertionError("there is always a free number")


def _begin(config: Config, goes_on: bool) -> bool:
    run = config.output
    if not goes_on and files.complete_checkpoints(run):
        raise UserError(f"output = {run}: another process has trained there meanwhile; the same command continues it")
    files.remove_leftovers(run)
    left = [] if goes_on else [path for name in (*OF_AN_ATTEMPT, EVENTS) for path in run.glob(name)]
    for path in left:
        path.unlink()
    write_whole(run / "config.yaml", to_yaml(config).encode())
    return bool(left)
