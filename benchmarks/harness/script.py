"""The command line of a benchmark that is started as `python -m unigrad_fast.benchmarks.ROOM.NAME`."""

from __future__ import annotations

import sys
from collections.abc import Callable

import tyro

from unigrad_fast.runtime.console import take_over
from unigrad_fast.runtime.errors import RunStopped, UserError


def run(main: Callable[..., int | None], arguments: list[str] | None = None) -> int:
    """Calls `main` with what the command line says; `--help` shows the module's docstring.

    Returns:
        The exit status: what `main` returns, or that of `unigrad-fast` where it ends early.
    """
    take_over()
    module = sys.modules[main.__module__]
    program = f"python -m {module.__spec__.name}"
    try:
        status = tyro.cli(main, prog=program, description=module.__doc__, args=arguments, use_underscores=True)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RunStopped as error:
        print(f"stopped: {error}", file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return status or 0
