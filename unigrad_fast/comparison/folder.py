"""A comparison's folder: the names in it, what was asked, the lock, and how members that failed ended.

FOLDER/comparison.yaml       what is compared: the options of the command
FOLDER/NAME-seed-S/          a member, an ordinary run
FOLDER/logs/NAME-seed-S.txt  what its latest attempt printed, and its exit status
FOLDER/table.md, .csv, .json
FOLDER/trajectories, justification, accuracy, minutes: pictures, as .png and .svg, with their numbers as .csv
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from unigrad_fast.comparison.members import Member
from unigrad_fast.runtime import strict_yaml
from unigrad_fast.runtime.errors import INTERRUPTED, PREEMPTED, UserError
from unigrad_fast.runtime.files import unwritable, write_whole
from unigrad_fast.runtime.outputs import within_images
from unigrad_fast.runtime.run_folder import RunFolder, locked

OTHER = "give another folder"
PICTURES = ("trajectories", "justification", "accuracy", "minutes")
STATUS = "exit status"  # begins the last line of a log
LONGEST_LOG = 1 << 16  # bytes from its end


class ComparisonFolder:
    """The folder of one comparison, which need not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.asked = path / "comparison.yaml"
        self.logs = path / "logs"
        self.tables = {kind: path / f"table.{kind}" for kind in ("md", "csv", "json")}
        self.pictures = {name: path / f"{name}.png" for name in PICTURES}  # beside each .svg and .csv

    def read(self) -> dict[str, Any] | None:
        """The options of the comparison in the folder; None if there is none. Raises UserError if it is damaged."""
        if not os.path.lexists(self.asked):
            return None
        try:
            tree = strict_yaml.read(self.asked.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, UserError) as error:
            raise UserError(f"{self.asked}: cannot be read ({error}); {OTHER}") from None
        if not isinstance(tree, dict):
            raise UserError(f"{self.asked}: is no comparison; {OTHER}")
        return tree

    def require(self, images: Mapping[str, Path | None]) -> None:
        """Raises UserError unless a comparison can be written here.

        Args:
            images: folders of images by the keys that named them.
        """
        problem = within_images(self.path, images) or unwritable(self.path)
        if problem is None and RunFolder(self.path).holds_run():
            problem = f"holds a run; {OTHER}"
        if problem is None and not os.path.lexists(self.asked):
            drawn = [path.with_suffix(ending) for path in self.pictures.values() for ending in (".png", ".svg", ".csv")]
            ours = [each for each in (*self.tables.values(), *drawn, self.logs) if os.path.lexists(each)]
            if ours:
                problem = f"holds no comparison, but {ours[0].name}, which one would replace; {OTHER}"
        if problem:
            raise UserError(f"folder = {self.path}: {problem}")

    def write(self, asked: Mapping[str, Any]) -> None:
        content = yaml.safe_dump(dict(asked), sort_keys=False, allow_unicode=True).encode()
        if not self.asked.is_file() or self.asked.read_bytes() != content:
            write_whole(self.asked, content)

    @contextmanager
    def occupied(self) -> Iterator[None]:
        """Makes the folder and locks it against other comparisons while inside."""
        self.logs.mkdir(parents=True, exist_ok=True)
        with locked(
            self.path / ".lock", f"folder = {self.path}: another process compares in this folder; end it first"
        ):
            yield

    def log(self, member: Member) -> Path:
        return self.logs / f"{member.name}.txt"

    def failure(self, member: Member) -> str | None:
        """Why a member's latest attempt failed; None if it did not, or was asked to exit."""
        if stopped := RunFolder(member.config.output).reason_of_stop():
            return stopped
        lines = self._last_lines(member)
        match = re.fullmatch(rf"{STATUS} (-?\d+)", lines[-1]) if lines else None
        status = int(match[1]) if match else 0
        if status in (0, PREEMPTED, INTERRUPTED):
            return None
        if status < 0 or status > 128:
            number = -status if status < 0 else status - 128
            with suppress(ValueError):
                return f"killed by {signal.Signals(number).name}"
        said = [line for line in lines[:-1] if line.startswith(("error: ", "stopped: "))]
        return " ".join([f"status {status}:", *(said or lines[-2:-1])])

    def _last_lines(self, member: Member) -> list[str]:
        with suppress(OSError), open(self.log(member), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - LONGEST_LOG))
            return [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
        return []
