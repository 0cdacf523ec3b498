"""The command line of a benchmark that is started as `python -m unigrad_fast.benchmarks.FOLDER.NAME`."""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path

from unigrad_fast.runtime.console import take_over
from unigrad_fast.runtime.errors import RunStopped, UserError


def path(text: str) -> Path:
    """The path that an argument names; ~ is the home folder."""
    return Path(text).expanduser()


KINDS = {"int": int, "str": str, "Path": path, "Path | None": path}  # by annotation


def run(main: Callable[..., int | None], arguments: list[str] | None = None) -> int:
    """Call `main` with the command line's options; `--help` shows the module's and the arguments' docstrings.

    Returns:
        The exit status: the value that `main` returns, or as for `unigrad-fast` if it fails.
    """
    take_over()
    options = vars(_parser(main).parse_args(arguments))
    try:
        status = main(**options)
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


def _parser(main: Callable[..., int | None]) -> argparse.ArgumentParser:
    """A parser with an option for each argument of a function whose annotations are strings."""
    module = sys.modules[main.__module__]
    parser = argparse.ArgumentParser(
        prog=f"python -m {module.__spec__.name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for name, argument in inspect.signature(main).parameters.items():
        said = re.search(rf"^ +{name}: (.*?)\.?$", main.__doc__, re.MULTILINE)
        required = argument.default is argument.empty
        parser.add_argument(
            f"--{name}",
            type=KINDS[argument.annotation],
            required=required,
            default=None if required else argument.default,
            help=said and said[1],
        )
    return parser
