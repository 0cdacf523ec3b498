"""The file in which a training that takes hours keeps what it has reached, for the same command to go on."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from unigrad_fast.runtime.process_group import World, on_first
from unigrad_fast.runtime.whole_file import write_whole


class Unfinished:
    """One file per set of settings, so that those of another call stay as they are.

    Args:
        folder: of the file.
        stem: what its name begins with.
        settings: JSON values that decide the result.
        world: its ranks call the methods together.
        say: takes lines for the user.
    """

    def __init__(
        self, folder: Path, stem: str, settings: Mapping[str, Any], world: World, say: Callable[[str], None]
    ) -> None:
        self.settings = json.dumps(settings, sort_keys=True)
        digest = hashlib.sha256(self.settings.encode()).hexdigest()[:8]
        self.path, self.world, self.say = folder / f"{stem}-{digest}.unfinished.pt", world, say

    def load(self) -> dict[str, Any] | None:
        """What was kept last, with tensors on the CPU; None where there is nothing, or it cannot be used."""
        return on_first(self._load)

    def save(self, state: dict[str, Any]) -> None:
        """Raises OSError on all ranks where the file cannot be written; the one before stays then."""
        on_first(lambda: self._save(state))

    def delete(self) -> None:
        if self.world.rank == 0:
            self.path.unlink(missing_ok=True)

    def _load(self) -> dict[str, Any] | None:
        if not self.path.is_file():
            return None
        try:
            content = torch.load(self.path, map_location="cpu", weights_only=True)
            settings, state = content["settings"], content["state"]
        except Exception:  # whatever comes of reading arbitrary bytes as a pickle
            self.say(f"{self.path}: damaged, so the training begins anew")
            return None
        return state if settings == self.settings else None

    def _save(self, state: dict[str, Any]) -> None:
        self.path.parent.mkdir(exist_ok=True)
        content = io.BytesIO()
        torch.save({"settings": self.settings, "state": state}, content)
        write_whole(self.path, content.getvalue())
