"""A run's folder: the names of its files, who may write to it, its configuration, and how the last attempt ended.

A launcher may report another status than its ranks exited with: `srun --kill-on-bad-exit=1` kills the others as soon as
one has exited, and torchrun always reports 1. So RUN/preempted.txt says that the run was asked to exit and the same
command resumes it, RUN/stopped.txt that it stopped itself and needs attention. Processes restarted by torchrun exit
with the same status again; the next command removes both files.
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
from unigrad_fast.runtime.files import dangling_link, write_whole
from unigrad_fast.runtime.wording import byte_size

NEW_RUN = "to start a new run, choose another --output"
KEYS = ("seed", "output", "recipe", "data", "model", "objective", "target", "optimizer", "schedule")
LARGEST_CONFIGURATION = 1 << 20  # bytes; a run's file has a few thousand
STOPPED_STATUS = 3
CHECKPOINT = "checkpoint.json"  # present in every complete checkpoint


@dataclass(frozen=True)
class Entry:
    """A name in a run's folder; as an attribute of a `RunFolder` instance it is the path.

    Attributes:
        is_folder: it is a folder, not a file.
        is_own: a run replaces files of this name, so a folder with it is refused unless it holds a run.
        is_mark: a folder that has all marked names is a run's, not a folder of images.
        is_of_attempt: it is a file that is deleted when the run starts over.
        judges: it is an evaluation of the run's checkpoints.
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
    """The folder of one run, which need not exist yet."""

    configuration = Entry("config.yaml", is_mark=True)
    metrics = Entry("metrics.jsonl", is_mark=True)
    log = Entry("log.txt", is_mark=True)
    summary = Entry("summary.json", is_of_attempt=True)
    curves = Entry("curves.png", is_of_attempt=True)
    curves_as_svg = Entry("curves.svg", is_of_attempt=True)
    bad_images = Entry("bad_images.jsonl", is_of_attempt=True)
    checkpoints = Entry("checkpoints", is_folder=True)
    tensorboard = Entry("tensorboard", is_folder=True)
    evaluation = Entry("evaluation", is_folder=True, judges=True)
    first_knn = Entry("knn.json", judges=True)  # this and the next two: written by early versions of `evaluate`
    first_linear = Entry("linear.json", judges=True)
    first_probe = Entry("linear.safetensors", judges=True)
    exports = Entry("export", is_folder=True, is_own=False)  # the only folder that other commands may write to
    preempted = Entry("preempted.txt", is_own=False)
    stopped = Entry("stopped.txt", is_own=False)
    lock = Entry(".lock", is_own=False)

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def holds_run(self) -> bool:
        """Whether the folder holds a run: the configuration that every run writes first, or a checkpoint."""
        return _is_configuration(self.configuration) or self._has_checkpoint()

    def problem(self) -> str | None:
        """Why a run can be neither started nor resumed in this folder; None if it can."""
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
            return f"not a run's folder, but a run would replace {names}; give another folder, or move them away"
        for each in ours:
            path = self.path / each.name
            if problem := dangling_link(path):
                return problem
            if each.is_folder != os.path.isdir(path):
                found, wanted = ("file", "folder") if each.is_folder else ("folder", "file")
                return f"{each.name} is a {found}, but must be a {wanted}; move it away, or give another folder"
        judged = ", ".join(each.name for each in ours if each.judges)
        if judged and not self._has_checkpoint():
            return f"{judged} belongs to deleted checkpoints; move it away, or give another folder"
        return None

    def saved_configuration(self) -> dict[str, Any] | None:
        """The tree in config.yaml, unchecked; None without that file. Raises UserError if it is damaged."""
        from unigrad_fast.runtime import strict_yaml

        path = self.configuration
        if not path.is_file():
            return None
        try:
            saved = strict_yaml.read(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, UserError) as error:
            raise UserError(f"{path}: cannot be read ({error}); {NEW_RUN}") from None
        if not isinstance(saved, dict):
            raise UserError(f"{path}: not a run's configuration; {NEW_RUN}")
        return saved

    @contextmanager
    def occupied(self, numbered: bool = False) -> Iterator[RunFolder]:
        """Makes the folder and locks it against other processes while inside; all ranks call this together.

        Args:
            numbered: if the name is taken, use NAME-2, NAME-3, ... instead. The folder used is yielded.

        Raises:
            UserError: on all ranks, if another process writes to it, or it holds files that a run would replace.
            OSError: on all ranks, if it cannot be written.
        """
        from unigrad_fast.runtime.process_group import on_first

        with ExitStack() as stack:
            yield RunFolder(on_first(lambda: _occupy(self.path, numbered, stack)))

    def begin(self, configuration: str, goes_on: bool) -> bool:
        """Writes config.yaml, and deletes the files of a previous attempt except log.txt, unless the run is resumed.

        Returns:
            Whether there were such files.

        Args:
            configuration: the text of config.yaml.
            goes_on: the run is resumed from a checkpoint, so its files are kept.

        Raises:
            UserError: another process has meanwhile saved a checkpoint in the folder of a new run.
        """
        if not goes_on and self.complete_checkpoints():
            raise UserError(
                f"output = {self}: another process trained there meanwhile; the same command resumes that run"
            )
        left = [] if goes_on else [path for name in OF_AN_ATTEMPT for path in self.path.glob(name)]
        for path in left:
            path.unlink()
        write_whole(self.configuration, configuration.encode())
        return bool(left)

    def little_space(self, checkpoint: int, keep: int) -> str | None:
        """A warning if fewer than two checkpoints of so many bytes fit on the disk; None otherwise."""
        free = shutil.disk_usage(self.path).free
        if free >= 2 * checkpoint:
            return None
        return (
            f"little space: {byte_size(free)} are free on the disk of {self}, a checkpoint takes "
            f"{byte_size(checkpoint)}, and checkpoint.keep = {keep} keeps up to {keep + 1} of them; free disk space, "
            "or the run may stop"
        )

    def clear_endings(self, environ: Mapping[str, str]) -> None:
        """Removes notes on how the previous attempt ended; files of the same names that are not ours stay.

        Raises:
            Preempted, RunStopped: as in that attempt, if torchrun restarts processes that ended on purpose.
        """
        if int(environ.get("TORCHELASTIC_RESTART_COUNT") or 0) > 0:
            if ended := _ending(self.stopped):
                raise RunStopped(f"{ended[1]}; run the same command again for another attempt")
            if ended := _ending(self.preempted):
                raise Preempted(ended[1], ended[0])
        for path in (self.preempted, self.stopped):
            if _ending(path):
                with suppress(OSError):
                    path.unlink()

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Records in the folder how an attempt ends on purpose; preempted ranks wait here for each other."""
        from unigrad_fast.runtime.process_group import on_first

        try:
            yield
        except Preempted as error:
            status, said = error.status, str(error)
            on_first(lambda: self.note_preemption(status, said))
            raise
        except RankLost:
            raise
        except RunStopped as error:  # possibly on this rank only
            _note(self.stopped, STOPPED_STATUS, str(error))
            raise

    def note_preemption(self, status: int, said: str) -> None:
        """Records that an attempt was asked to exit, if the disk permits."""
        _note(self.preempted, status, said)

    def log_loss(self, said: str) -> None:
        """Records a lost rank in log.txt, if the disk permits; the collective's own error does not name the rank."""
        with suppress(OSError), open(self.log, "a", encoding="utf-8", errors="surrogateescape") as file:
            file.write(log_line(f"stopped: {said}"))

    def reason_of_stop(self) -> str | None:
        """Why the last attempt stopped itself; None if it did not."""
        ended = _ending(self.stopped)
        return None if ended is None else ended[1]

    def is_occupied(self) -> bool:
        """Whether a process is training in the folder."""
        if not self.lock.exists():
            return False
        try:
            with locked(self.lock, "occupied"):
                return False
        except UserError:
            return True

    def complete_checkpoints(self) -> list[Path]:
        """Folders of the complete checkpoints, oldest first; copies under other names are ignored."""
        found = self.checkpoints.glob("step-*")
        return sorted(path for path in found if re.fullmatch(r"step-\d+", path.name) and path.is_dir())

    def checkpoints_by_step(self) -> dict[int, Path]:
        """The complete checkpoints, oldest first."""
        return {int(folder.name.removeprefix("step-")): folder for folder in self.complete_checkpoints()}

    def _has_checkpoint(self) -> bool:
        return any(self.checkpoints.glob(f"step-*/{CHECKPOINT}"))


ENTRIES = [each for each in vars(RunFolder).values() if isinstance(each, Entry)]
OWN = [each for each in ENTRIES if each.is_own]
OF_AN_ATTEMPT = [
    *(each.name for each in ENTRIES if each.is_of_attempt),
    *("metrics.*", "tensorboard/events.out.tfevents.*"),  # of the loggers
]
marks.OF_A_RUN.update(os.fsencode(each.name) for each in ENTRIES if each.is_mark)


def log_line(message: str) -> str:
    """A line of log.txt, with the time of day."""
    return f"{datetime.now().isoformat(sep=' ', timespec='seconds')}  {message}\n"


@contextmanager
def locked(path: Path, otherwise: str) -> Iterator[None]:
    """Holds the lock of a file, which is made, while inside; the system releases it however this process ends.

    Raises:
        UserError: with the text `otherwise`, if another process holds it.
    """
    import fcntl  # not on every system; the package can be imported without it

    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise UserError(otherwise) from None
            # A file system without locks: go on without one.
        yield
    finally:
        os.close(lock)


def _occupy(wanted: Path, numbered: bool, stack: ExitStack) -> Path:
    """Makes the folder and locks it until the stack ends."""
    if not numbered and (problem := RunFolder(wanted).problem()):
        raise UserError(f"output = {wanted}: {problem}")
    absent = [folder for folder in (wanted, *wanted.parents) if not folder.exists()]
    run = RunFolder(_make_numbered(wanted) if numbered else wanted)
    run.path.mkdir(parents=True, exist_ok=True)
    made = [run.path, *(folder for folder in absent if folder != wanted)] if numbered else absent
    if not run.lock.exists():
        made = [run.lock, *made]
    stack.enter_context(
        locked(
            run.lock,
            f"output = {run}: another process is training in this folder; end it first, or give another folder",
        )
    )
    stack.callback(_leave, run, made)
    return run.path


def _leave(run: RunFolder, made: list[Path]) -> None:
    """If nothing was written, removes what was made, innermost first; the folder is still locked."""
    if not run.configuration.exists():
        with suppress(OSError):
            for path in made:
                path.unlink() if path == run.lock else path.rmdir()


def _make_numbered(wanted: Path) -> Path:
    """Makes the first of NAME, NAME-2, NAME-3, ... that does not exist; concurrent calls get different folders."""
    wanted.parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        run = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        with suppress(FileExistsError):
            run.mkdir()
            return run
    raise AssertionError("there is always a free number")


def _is_configuration(path: Path) -> bool:
    """Whether a file is a complete configuration including the run's folder, as a run writes it."""
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
    """Status and message; None if there is no such file, or it is not ours."""
    with suppress(OSError, UnicodeDecodeError):
        with open(path, encoding="utf-8") as file:
            match = re.fullmatch(r"status (\d+): (.*)\n?", file.read(1 << 16))
        return match and (int(match[1]), match[2])
    return None
