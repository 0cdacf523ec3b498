"""The saved progress of a training whose result is not written yet."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unigrad_fast.runtime.errors import UserError
from unigrad_fast.runtime.file_errors import remedy
from unigrad_fast.runtime.files import write_whole
from unigrad_fast.runtime.process_group import on_first
from unigrad_fast.runtime.wording import byte_size


class Unfinished:
    """The file with the progress of one training; each set of settings has its own.

    Args:
        folder: folder of the file.
        stem: start of its name.
        settings: JSON values that determine the result.
        say: prints a line for the user.

    Attributes:
        error: why the last state could not be saved; None if it is saved, or nothing was to be saved yet.
    """

    error: OSError | None = None

    def __init__(self, folder: Path, stem: str, settings: Mapping[str, Any], say: Callable[[str], None]) -> None:
        self.settings = json.dumps(settings, sort_keys=True)
        digest = hashlib.sha256(self.settings.encode()).hexdigest()[:8]
        self.path, self.say = folder / f"{stem}-{digest}.unfinished.pt", say

    def load(self) -> dict[str, Any] | None:
        """The last saved state, with tensors on the CPU; None if there is none, or it cannot be used.

        All ranks call this and `save` together.
        """
        return on_first(self._load)

    def save(self, state: dict[str, Any]) -> None:
        """Saves a state, that of the first rank; if it cannot be written, says so, and the previous one is kept.

        A training goes on without: its result may still be printed, and there may be room again later.
        """
        self.error = on_first(lambda: self._save(state))

    def require_room(self, size: int) -> None:
        """Raises UserError if the disk has no room for so many bytes in place of what is saved. Call on one rank."""
        folder = next(path for path in self.path.parents if path.exists())
        free = shutil.disk_usage(folder).free + (self.path.stat().st_size if self.path.is_file() else 0)
        if free < size:
            raise UserError(
                f"output = {self.path.parent}: progress and weights take up to {byte_size(size)}, but "
                f"{byte_size(free)} are free on its disk; free some, or give another folder with --output"
            )

    def kept(self, what: str) -> str:
        """Whether `what`, such as "the classifier is", is saved; for a command that ends without a result."""
        return f"{what} {'saved' if self.error is None else 'not saved, and would be trained again'}"

    def delete(self) -> None:
        """Call on one rank."""
        self.path.unlink(missing_ok=True)

    def _load(self) -> dict[str, Any] | None:
        if not self.path.is_file():
            return None
        try:
            content = torch.load(self.path, map_location="cpu", weights_only=True)
            settings, state = content["settings"], content["state"]
        except Exception:  # arbitrary bytes read as a pickle can raise anything
            self.say(f"{self.path}: damaged; the training starts again")
            return None
        return state if settings == self.settings else None

    def _save(self, state: dict[str, Any]) -> OSError | None:
        content = io.BytesIO()
        torch.save({"settings": self.settings, "state": state}, content)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.path, content.getvalue())
        except OSError as error:
            if self.error is None:
                self.say(
                    f"warning: {self.path} cannot be written: {error.strerror}; {remedy(error)}. The training goes on, "
                    "and its progress is saved once there is room"
                )
            return error
        return None


class Series:
    """Several trainings, one after the other, whose progress is in one file; all ranks use it together.

    Attributes:
        done: what `end` was given for each training that has ended: numbers, texts, lists and dicts of them.
        weights: of the last training that has ended, until the next one saves its state; empty if none has.
    """

    def __init__(self, unfinished: Unfinished) -> None:
        self.unfinished = unfinished
        saved = {"done": [], "current": None, "weights": {}} | (unfinished.load() or {})
        self.done: list[Any] = saved["done"]
        self.weights: dict[str, Tensor] = saved["weights"]
        self._current: dict[str, Any] | None = saved["current"]

    @property
    def error(self) -> OSError | None:
        """As that of the file."""
        return self.unfinished.error

    def load(self) -> dict[str, Any] | None:
        """The state of the first training that has not ended; None if it has not begun."""
        return self._current

    def save(self, state: dict[str, Any]) -> None:
        """Saves the state of that training."""
        self.unfinished.save({"done": self.done, "current": state})

    def end(self, result: Any, weights: dict[str, Tensor]) -> None:
        """That training has ended; saves its result and its weights, on the CPU."""
        self.done.append(result)
        self._current, self.weights = None, weights
        self.unfinished.save({"done": self.done, "current": None, "weights": weights})
