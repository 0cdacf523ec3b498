"""How an attempt ended, as a file in the run's folder: for job scripts, and for ranks that a launcher starts again.

A launcher may report another status than its ranks ended with: `srun --kill-on-bad-exit=1` ends the others by a signal
as soon as one has left, torchrun says 1 whatever it was. So RUN/preempted.txt says that the run was told to leave and
the same command goes on, RUN/stopped.txt that it stopped itself and somebody has to look. Processes that torchrun
starts again leave with the same status; the next command clears both.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from unigrad_fast.runtime.errors import Preempted, RankLost, RunStopped
from unigrad_fast.runtime.fallback import printable
from unigrad_fast.runtime.process_group import World, on_first
from unigrad_fast.runtime.whole_file import write_whole
from unigrad_fast.training.telemetry.messages import line

PREEMPTED, STOPPED = "preempted.txt", "stopped.txt"
STOPPED_STATUS = 3


@contextmanager
def noted(run: Path, world: World) -> Iterator[None]:
    """Writes down how an attempt ends on purpose; preempted ranks meet here, so that none leaves before the others."""
    try:
        yield
    except Preempted as error:
        said, status = str(error), error.status
        on_first(lambda: note_preemption(run, status, said))
        raise
    except RankLost:
        raise
    except RunStopped as error:  # maybe on this rank alone
        _write(run / STOPPED, STOPPED_STATUS, str(error))
        raise


def note_preemption(run: Path, status: int, said: str) -> None:
    """Writes down that an attempt was told to leave, where the disk takes it."""
    _write(run / PREEMPTED, status, said)


def log_loss(run: Path, said: str) -> None:
    """Into RUN/log.txt, where the disk takes it; the error of a collective, which stands there, names nobody."""
    with suppress(OSError), open(run / "log.txt", "a", encoding="utf-8", errors="surrogateescape") as file:
        file.write(line(f"stopped: {said}"))


def begin_anew(run: Path, environ: Mapping[str, str]) -> None:
    """Removes what an attempt before has written; files of these names that are somebody else's stay.

    Raises:
        Preempted, RunStopped: as then, where torchrun starts the processes again though they ended on purpose.
    """
    if int(environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0:
        if ended := _read(run / STOPPED):
            raise RunStopped(f"{ended[1]}; the same command, typed anew, begins another attempt")
        if ended := _read(run / PREEMPTED):
            raise Preempted(ended[1], ended[0])
    for path in (run / PREEMPTED, run / STOPPED):
        if _read(path):
            with suppress(OSError):
                path.unlink()


def _write(path: Path, status: int, said: str) -> None:
    with suppress(OSError):
        if path.exists() and not _read(path):
            return  # not ours
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, printable(f"status {status}: {' '.join(said.split())}\n").encode())


def _read(path: Path) -> tuple[int, str] | None:
    """Status and message; None where there is no such file of ours."""
    with suppress(OSError, UnicodeDecodeError):
        with open(path, encoding="utf-8") as file:
            match = re.fullmatch(r"status (\d+): (.*)\n?", file.read(1 << 16))
        return match and (int(match[1]), match[2])
    return None
