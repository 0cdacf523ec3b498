"""The saved progress of a training whose result is not written yet."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from unigrad_fast.runtime.files import write_whole
from unigrad_fast.runtime.process_group import on_first


class Unfinished:
    """The file with the progress of one training; each set of settings has its own.

    Args:
        folder: folder of the file.
        stem: start of its name.
        settings: JSON values that determine the result.
        say: prints a line for the user.
    """

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
        """Saves a state. Raises OSError on all ranks if the file cannot be written; the previous one is kept then."""
        on_first(lambda: self._save(state))

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

    def _save(self, state: dict[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        content = io.BytesIO()
        torch.save({"settings": self.settings, "state": state}, content)
        write_whole(self.path, content.getvalue())


class Series:
    """Several trainings, one after the other, whose progress is in one file; all ranks use it together.

    Attributes:
        done: what `end` was given for each training that has ended: numbers, texts, lists and dicts of them.
    """

    def __init__(self, unfinished: Unfinished) -> None:
        self.unfinished = unfinished
        saved = unfinished.load() or {"done": [], "current": None}
        self.done: list[Any] = saved["done"]
        self._current: dict[str, Any] | None = saved["current"]

    def load(self) -> dict[str, Any] | None:
        """The state of the first training that has not ended; None if it has not begun."""
        return self._current

    def save(self, state: dict[str, Any]) -> None:
        """Saves the state of that training."""
        self.unfinished.save({"done": self.done, "current": state})

    def end(self, result: Any) -> None:
        """That training has ended; saves its result."""
        self.done.append(result)
        self._current = None
        self.unfinished.save({"done": self.done, "current": None})
