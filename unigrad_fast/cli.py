"""The command `unigrad-fast`: finds the sub-command, checks its arguments, and turns errors into an exit status.

Exit status: 0 done, 1 a bug (with a traceback), 2 wrong input, 3 the run stopped itself, 75 preempted, 130 Ctrl-C, both
after saving if there is something to save. It does not depend on whether standard output is read.
"""

from __future__ import annotations

import difflib
import errno
import itertools
import os
import sys
from collections.abc import Sequence

import unigrad_fast
from unigrad_fast.commands import COMMANDS, RENAMED, checked
from unigrad_fast.config import Config, resolve
from unigrad_fast.recipes import recipe_names
from unigrad_fast.runtime import command_help, console, limits, processors
from unigrad_fast.runtime.command_help import positionals
from unigrad_fast.runtime.errors import INTERRUPTED, DataError, Preempted, RunStopped, UserError
from unigrad_fast.runtime.fallback import harmless
from unigrad_fast.runtime.file_errors import STORAGE, WRITING, remedy
from unigrad_fast.runtime.older_names import note
from unigrad_fast.runtime.out_of_memory import asked_for, is_out_of_memory
from unigrad_fast.runtime.packages import complaint
from unigrad_fast.runtime.trees import parse_arguments


def overview() -> str:
    """Text of `unigrad-fast --help`."""
    rows = "\n".join(f"  {usage(name):32}{options.__doc__}" for name, (options, _) in COMMANDS.items())
    return f"""usage: unigrad-fast COMMAND [--key value ...]

{unigrad_fast.__doc__}

commands:
{rows}

`unigrad-fast COMMAND --help` lists the keys of a command. Recipes: {", ".join(recipe_names())}."""


def usage(name: str) -> str:
    """A command's name with its positional arguments."""
    arguments = positionals(COMMANDS[name][0]).items()
    return " ".join([name, *(argument.upper() + several * "..." for argument, several in arguments)])


def split_command(words: Sequence[str]) -> tuple[str, Sequence[str]]:
    """The command that the words begin with, and the remaining words."""
    for name in (*COMMANDS, *RENAMED):
        length = len(name.split())
        if list(words[:length]) == name.split():
            if name in RENAMED:
                note(name, RENAMED[name])
            return RENAMED.get(name, name), words[length:]
    group = [name for name in COMMANDS if name.startswith(f"{words[0]} ")]
    usages = ", ".join(map(usage, group))
    if group and (len(words) == 1 or words[1].startswith("-")):
        raise UserError(f"{words[0]}: names a group of commands; type one of {usages}")
    given = " ".join(itertools.takewhile(lambda word: not word.startswith("-"), words)) or words[0]
    if group:
        inner = {name.split()[1]: name for name in (*group, *RENAMED) if name.startswith(f"{words[0]} ")}
        close = [inner[word] for word in difflib.get_close_matches(words[1], inner, n=1)]
    else:
        close = [name for name in COMMANDS if name.split()[-1] == words[0]]
        close = close or difflib.get_close_matches(given, [*COMMANDS, *RENAMED], n=1)
    others = f"type one of {usages}" if group else f"commands are {', '.join(COMMANDS)}"
    raise UserError(
        f"{given}: unknown command; " + (f"did you mean {RENAMED.get(close[0], close[0])}?" if close else others)
    )


def run(words: Sequence[str]) -> None:
    """Finds the command, checks its arguments and calls it."""
    if words[0] == "--version":
        print(f"unigrad-fast {unigrad_fast.__version__}")
        return
    groups = {name.split()[0] for name in COMMANDS}
    wants_help = "-h" in words or "--help" in words
    words = [word for word in words if word not in ("-h", "--help")]
    if not words or (wants_help and len(words) == 1 and words[0] in groups - COMMANDS.keys()):
        print(overview())
        return
    name, arguments = split_command(words)
    options, command = COMMANDS[name]
    tree = parse_arguments(arguments, positionals(options))
    if wants_help:
        defaults = resolve(tree.get("recipe"), model=options) if issubclass(options, Config) else None
        print(command_help.text(f"unigrad-fast {usage(name)}", options, defaults))
        raise SystemExit(0)
    command(checked(name, tree))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    processors.begin()
    console.take_over()
    words = sys.argv[1:] if arguments is None else arguments
    # The deepspeed launcher adds this argument; LOCAL_RANK has the same value.
    words = [word for word in words if not word.startswith("--local_rank=")]
    status = 0
    try:
        run(words or ["--help"])
    except (Exception, KeyboardInterrupt) as error:
        ended = explained(error)
        if ended is None:
            raise
        status, said = ended
        print(harmless(said), file=sys.stderr)
    finally:
        lost = console.end()
    if lost and status == 0:
        print(f"stopped: standard output cannot be written: {lost}; the output is incomplete", file=sys.stderr)
        return 3
    return status


def explained(error: BaseException) -> tuple[int, str] | None:
    """The exit status and message of an error; None if it is a bug."""
    rank = os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0"
    prefix = "error" if rank == "0" else f"error on rank {rank}"
    if isinstance(error, UserError | DataError):
        return 2, "\n".join(f"{prefix}: {line}" for line in str(error).split("\n"))
    if isinstance(error, Preempted):
        return error.status, f"{'interrupted' if error.status == INTERRUPTED else 'preempted'}: {error}"
    if isinstance(error, RunStopped):
        return 3, f"stopped: {error}"
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, "interrupted"
    if isinstance(error, ModuleNotFoundError) and (said := complaint(error.name or "")):
        return 2, f"{prefix}: {said}"
    if said := limits.explained(error):
        return 2, f"{prefix}: {said}"
    if is_out_of_memory(error):
        return 3, f"stopped: out of memory{asked_for(error)}; end other programs, or use smaller parts"
    if not isinstance(error, OSError):
        return None
    wrong_paths = (errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.ENOENT, errno.ELOOP)
    if error.filename and error.errno in wrong_paths:
        return 2, f"{prefix}: {os.fsdecode(error.filename)}: {error.strerror}; give another path"
    if error.filename and error.errno in STORAGE:
        return 3, f"stopped: {os.fsdecode(error.filename)}: {error.strerror}; {remedy(error)}"
    if error.errno in WRITING:
        return 3, f"stopped: {error.filename or 'a file'} cannot be written: {error.strerror}; {remedy(error)}"
    return None
