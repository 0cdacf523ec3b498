"""The folder of a run: what is in it under which name, who may write to it, its configuration, how an attempt ended.

A launcher may report another status than its ranks ended with: `srun --kill-on-bad-exit=1` ends the others by a signal
as soon as one has left, torchrun says 1 whatever it was. So RUN/preempted.txt says that the run was told to leave and
the same command goes on, RUN/stopped.txt that it stopped itself and somebody has to look. Processes that torchrun
starts again leave with the same status; the next command clears both.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from unigrad_fast.pipelines.listing import marks
from unigrad_fast.runtime.errors import Preempted, RankLost, RunStopped, UserError
from unigrad_fast.runtime.fallback import printable
from unigrad_fast.runtime.links import dangling_link
from unigrad_fast.runtime.whole_file import write_whole
from unigrad_fast.runtime.wording import byte_size

NEW_RUN = "to start a new run, choose another --output"
KEYS = ("seed", "output", "recipe", "data", "model", "objective", "target", "optimizer", "schedule")
LARGEST_CONFIGURATION = 1 << 20  # bytes; a run's has some thousand
STOPPED_STATUS = 3
CHECKPOINT = "checkpoint.json"  # which every complete checkpoint has


@dataclass(frozen=True)
class Entry:
    """A name in the folder of a run; as an attribute of a `RunFolder` it is the path there.

    Attributes:
        is_folder: it is a folder, not a file.
        is_own: a run replaces what has this name, so that it is refused where no run lies.
        is_mark: a folder that has all of these is a run's, and no folder of images.
        is_of_attempt: it goes where the run begins again.
        judges: it says something of the run's checkpoints.
    """

    name: str
    is_folder: bool = False
    is_own: bool = True
    is_mark: bool = False
    is_of_attempt: bool = False
    judges: bool = False

    def __get__(self, run: RunFolder | None, owner: type[RunFolder]) -> Any:
        return self if run is None else run.path / self.name


class RunFolder:
    """One run's folder, whether it is there or not."""

    configuration = Entry("config.yaml", is_mark=True)
    metrics = Entry("metrics.jsonl", is_mark=True, is_of_attempt=True)
    log = Entry("log.txt", is_mark=True)
    summary = Entry("summary.json", is_of_attempt=True)
    curves = Entry("curves.png", is_of_attempt=True)
    curves_as_svg = Entry("curves.svg", is_of_attempt=True)
    bad_images = Entry("bad_images.jsonl", is_of_attempt=True)
    checkpoints = Entry("checkpoints", is_folder=True)
    tensorboard = Entry("tensorboard", is_folder=True)
    evaluation = Entry("evaluation", is_folder=True, judges=True)
    first_knn = Entry("knn.json", judges=True)  # where `evaluate` wrote before it had a folder, as the next two
    first_linear = Entry("linear.json", judges=True)
    first_probe = Entry("linear.safetensors", judges=True)
    exports = Entry("export", is_folder=True, is_own=False)  # the one folder that other commands may write to
    preempted = Entry("preempted.txt", is_own=False)
    stopped = Entry("stopped.txt", is_own=False)
    lock = Entry(".lock", is_own=False)

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def holds_run(self) -> bool:
        """Whether a run lies there: the configuration that every run begins with, or a checkpoint."""
        return _is_configuration(self.configuration) or self._has_checkpoint()

    def problem(self) -> str | None:
        """Why a run cannot be written here, or go on here; None when it can."""
        if problem := dangling_link(self.path):
            return problem
        if not os.path.exists(self.path):
            return None
        if not os.path.isdir(self.path):
            return "is a file; give a folder"
        try:
            there = os.listdir(self.path)
        except OSError as error:
            return f"cannot be listed ({error.strerror}); check its permissions, or give another folder"
        ours = sorted((each for each in OWN if each.name in there), key=lambda each: each.name)
        if ours and not self.holds_run():
            names = ", ".join(each.name for each in ours)
            return f"this is not a run, and a run would replace {names}; give another folder, or move them away"
        for each in ours:
            path = self.path / each.name
            if problem := dangling_link(path):
                return problem
            if each.is_folder != os.path.isdir(path):
                found, wanted = ("file", "folder") if each.is_folder else ("folder", "file")
                return f"{each.name} is a {found}, where a run keeps a {wanted}; move it away, or give another folder"
        judged = ", ".join(each.name for each in ours if each.judges)
        if judged and not self._has_checkpoint():
            return f"{judged} belongs to deleted checkpoints; move it away, or give another folder"
        return None

    def saved_configuration(self) -> dict[str, Any] | None:
        """The tree in config.yaml, unchecked; None where there is none. Raises UserError where it is damaged."""
        import yaml

        path = self.configuration
        if not path.is_file():
            return None
        try:
            saved = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise UserError(f"{path}: cannot be read ({error}); {NEW_RUN}") from None
        if not isinstance(saved, dict):
            raise UserError(f"{path}: is not the configuration of a run; {NEW_RUN}")
        return saved

    @contextmanager
    def occupied(self, numbered: bool = False) -> Iterator[RunFolder]:
        """Makes the folder and keeps other processes off it while inside; all ranks call this together.

        Args:
            numbered: where there is something of its name already, NAME-2, NAME-3, ... is taken, which it yields.

        Raises:
            UserError: on all ranks, when another process writes to it, or it holds what a run would replace.
            OSError: on all ranks, when it cannot be written.
        """
        from unigrad_fast.runtime.process_group import on_first

        with ExitStack() as stack:
            yield RunFolder(on_first(lambda: _occupy(self.path, numbered, stack)))

    def begin(self, configuration: str, goes_on: bool) -> bool:
        """Writes config.yaml; whether an attempt before had begun, whose files are cleared away but for log.txt.

        Args:
            configuration: the text.
            goes_on: the run goes on from a checkpoint, and so do its files.

        Raises:
            UserError: a checkpoint has come to a run that has none.
        """
        if not goes_on and self.complete_checkpoints():
            raise UserError(
                f"output = {self}: another process has trained there meanwhile; the same command continues it"
            )
        left = [] if goes_on else [path for name in OF_AN_ATTEMPT for path in self.path.glob(name)]
        for path in left:
            path.unlink()
        write_whole(self.configuration, configuration.encode())
        return bool(left)

    def little_space(self, checkpoint: int, keep: int) -> str | None:
        """What to warn of where less than two checkpoints of so many bytes fit on the disk; None when more do."""
        free = shutil.disk_usage(self.path).free
        if free >= 2 * checkpoint:
            return None
        return (
            f"little space: {byte_size(free)} are free on the disk of {self}, a checkpoint takes "
            f"{byte_size(checkpoint)}, and checkpoint.keep = {keep} has up to {keep + 1} of them there; make room, or "
            "the run may stop"
        )

    def clear_endings(self, environ: Mapping[str, str]) -> None:
        """Removes what says how the attempt before ended; files of these names that are somebody else's stay.

        Raises:
            Preempted, RunStopped: as then, where torchrun starts the processes again though they ended on purpose.
        """
        if int(environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0:
            if ended := _ending(self.stopped):
                raise RunStopped(f"{ended[1]}; the same command, typed anew, begins another attempt")
            if ended := _ending(self.preempted):
                raise Preempted(ended[1], ended[0])
        for path in (self.preempted, self.stopped):
            if _ending(path):
                with suppress(OSError):
                    path.unlink()

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Writes down how an attempt ends on purpose; preempted ranks wait here until all are there."""
        from unigrad_fast.runtime.process_group import on_first

        try:
            yield
        except Preempted as error:
            status, said = error.status, str(error)
            on_first(lambda: self.note_preemption(status, said))
            raise
        except RankLost:
            raise
        except RunStopped as error:  # maybe on this rank alone
            _note(self.stopped, STOPPED_STATUS, str(error))
            raise

    def note_preemption(self, status: int, said: str) -> None:
        """Writes down that an attempt was told to leave, where the disk takes it."""
        _note(self.preempted, status, said)

    def log_loss(self, said: str) -> None:
        """Into log.txt, where the disk takes it; the error of a collective, which stands there, names nobody."""
        with suppress(OSError), open(self.log, "a", encoding="utf-8", errors="surrogateescape") as file:
            file.write(log_line(f"stopped: {said}"))

    def complete_checkpoints(self) -> list[Path]:
        """Folders of the complete checkpoints, oldest first; a copy under another name is the user's."""
        found = self.checkpoints.glob("step-*")
        return sorted(path for path in found if re.fullmatch(r"step-\d+", path.name) and path.is_dir())

    def _has_checkpoint(self) -> bool:
        return any(self.checkpoints.glob(f"step-*/{CHECKPOINT}"))


ENTRIES = [each for each in vars(RunFolder).values() if isinstance(each, Entry)]
OWN = [each for each in ENTRIES if each.is_own]
OF_AN_ATTEMPT = [*(each.name for each in ENTRIES if each.is_of_attempt), "tensorboard/events.out.tfevents.*"]
marks.OF_A_RUN.update(os.fsencode(each.name) for each in ENTRIES if each.is_mark)


def log_line(message: str) -> str:
    """A line of log.txt, with the time of day."""
    return f"{datetime.now().isoformat(sep=' ', timespec='seconds')}  {message}\n"


def _occupy(wanted: Path, numbered: bool, stack: ExitStack) -> Path:
    """Makes and locks the folder until the stack ends; the system takes the lock back however this process ends."""
    import fcntl  # not on every system; the package can be imported without it

    if not numbered and (problem := RunFolder(wanted).problem()):
        raise UserError(f"output = {wanted}: {problem}")
    absent = [folder for folder in (wanted, *wanted.parents) if not folder.exists()]
    run = RunFolder(_make_numbered(wanted) if numbered else wanted)
    run.path.mkdir(parents=True, exist_ok=True)
    made = [run.path, *(folder for folder in absent if folder != wanted)] if numbered else absent
    if not run.lock.exists():
        made = [run.lock, *made]
    lock = os.open(run.lock, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            os.close(lock)
            raise UserError(
                f"output = {run}: another process trains in this folder; end it first, or give another folder"
            ) from None
        # A file system without locks: nothing to be done about it.
    stack.callback(_leave, run, lock, made)
    return run.path


def _leave(run: RunFolder, lock: int, made: list[Path]) -> None:
    """Gives the folder back; where nothing was written, what was made, the innermost first, is gone again."""
    if not run.configuration.exists():
        with suppress(OSError):
            for path in made:
                path.unlink() if path == run.lock else path.rmdir()
    os.close(lock)


def _make_numbered(wanted: Path) -> Path:
    """The first of NAME, NAME-2, NAME-3, ... that is not there, made; of several that ask at once each gets its own."""
    wanted.parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        run = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        with suppress(FileExistsError):
            run.mkdir()
            return run
    raise AssertionError("there is always a free number")


def _is_configuration(path: Path) -> bool:
    """Whether a file is the whole tree with the run's folder in it, as a run writes it."""
    import yaml

    try:
        with open(path, "rb") as file:
            tree = yaml.safe_load(file.read(LARGEST_CONFIGURATION).decode())
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return False
    return isinstance(tree, dict) and all(key in tree for key in KEYS) and isinstance(tree["output"], str)


def _note(path: Path, status: int, said: str) -> None:
    with suppress(OSError):
        if path.exists() and not _ending(path):
            return  # not ours
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, printable(f"status {status}: {' '.join(said.split())}\n").encode())


def _ending(path: Path) -> tuple[int, str] | None:
    """Status and message; None where there is no such file of ours."""
    with suppress(OSError, UnicodeDecodeError):
        with open(path, encoding="utf-8") as file:
            match = re.fullmatch(r"status (\d+): (.*)\n?", file.read(1 << 16))
        return match and (int(match[1]), match[2])
    return None
