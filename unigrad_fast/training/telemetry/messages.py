"""A run's messages: lines and warnings on the console and, with the time of day, in RUN/log.txt."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from unigrad_fast.runtime.run_folder import log_line


class Messages:
    """Prints text without interpreting markup, because a folder's name may look like it."""

    def __init__(self, console: Console, path: Path) -> None:
        self.console, self.path = console, path

    def open(self) -> None:
        self.failed = False
        self.file = self.path.open("a", encoding="utf-8", errors="surrogateescape", buffering=1)

    def close(self) -> None:
        with suppress(OSError):  # a message that could not be written before
            self.file.close()

    def say(self, message: str) -> None:
        self.log(message)
        self.show(message)

    def warn(self, message: str) -> None:
        """Shown in a frame if the console is a terminal."""
        self.log_warning(message)
        if self.console.is_terminal:
            self.console.print(Panel(Text(message), title="Warning", title_align="left", border_style="bold yellow"))
        else:
            self.show(f"WARNING: {message}")

    def log(self, message: str) -> None:
        """Write to the file only; if that fails, say so once."""
        try:
            self.file.write(log_line(message))
        except OSError as error:
            if not self.failed:
                self.failed = True
                self.show(f"WARNING: {self.path} cannot be written ({error.strerror}); the run goes on")

    def log_warning(self, message: str) -> None:
        self.log(f"WARNING: {message}")

    def show(self, message: str) -> None:
        """Print on the console only."""
        self.console.print(message, soft_wrap=True, markup=False, highlight=False)
