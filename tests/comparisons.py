"""`unigrad-fast compare`, whose members are forked from it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from command_process import CommandProcess
from forked_members import forked_members

from unigrad_fast.comparison.session import Session


def start_comparison(folder: Path, *arguments: object, draws: bool = False) -> CommandProcess:
    """Without pictures, which take seconds, unless `draws`."""
    return CommandProcess("compare", folder, *arguments, inside=[forked_members] + [undrawn] * (not draws))


def comparison(folder: Path, *arguments: object, draws: bool = False) -> subprocess.CompletedProcess:
    return start_comparison(folder, *arguments, draws=draws).end()


@contextmanager
def undrawn() -> Iterator[None]:
    with mock.patch.object(Session, "draw", lambda self: []):
        yield
