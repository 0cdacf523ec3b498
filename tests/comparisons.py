"""`unigrad-fast compare`, whose members are forked from it."""

from __future__ import annotations

import subprocess
from pathlib import Path

from command_process import CommandProcess
from forked_members import forked_members


def start_comparison(folder: Path, *arguments: object) -> CommandProcess:
    return CommandProcess("compare", folder, *arguments, inside=[forked_members])


def comparison(folder: Path, *arguments: object) -> subprocess.CompletedProcess:
    return start_comparison(folder, *arguments).end()
