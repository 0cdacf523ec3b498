"""A run's messages: lines and warnings on the console and, with the time of day, in RUN/log.txt."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from unigrad_fast.runtime.files import naming
from unigrad_fast.runtime.run_folder import log_line


class Messages:
    """Prints text without interpreting markup, because a folder's name may look like it."""

    def __init__(self, console: Console, path: Path) -> None:
        self.console, self.path = console, path

    def open(self) -> None:
        self.file = self.path.open("a", encoding="utf-8", errors="surrogateescape", buffering=1)

    def close(self) -> None:
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
        """Write to the file only."""
        with naming(self.path):
            self.file.write(log_line(message))

    def log_warning(self, message: str) -> None:
        self.log(f"WARNING: {message}")

    def show(self, message: str) -> None:
        """Print on the console only."""
        self.console.print(message, soft_wrap=True, markup=False, highlight=False)
