"""The command `unigrad-fast`: one options class and one function per sub-command.

Exit status: 0 done, 1 a bug (with a traceback), 2 the user's input, 3 the run stopped itself, 130 Ctrl-C.
torch, DeepSpeed and DALI are imported inside the functions that need them, so that `--help` answers at once.
"""

from __future__ import annotations

import difflib
import errno
import importlib.util
import itertools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tyro
from pydantic import Field

import unigrad_fast
from unigrad_fast.config import (
    Config,
    fresh_output,
    holds_run,
    parse_arguments,
    recipe_names,
    resolve,
    to_yaml,
)
from unigrad_fast.errors import DataError, RunStopped, UserError
from unigrad_fast.validation import AbsolutePath, Node, validate


class Pretrain(Config):
    """Pretrain an encoder on a folder of images."""

    print_config: bool = False
    """Print the resolved configuration as YAML, which --recipe accepts, and do nothing else."""
    verbose: bool = False
    """Show what DeepSpeed and the other libraries say."""


def pretrain(options: Pretrain) -> None:
    config = Config(**{key: getattr(options, key) for key in Config.model_fields})
    if options.print_config:
        print(to_yaml(config), end="")
        return
    # All ranks find the same free name, because rank 0 creates the folder only after all have met.
    config = config.model_copy(update={"output": config.output or fresh_output(config.recipe)})
    config.check_folders()
    require_dali()
    from unigrad_fast.distributed import launch_environment

    config.check_world(launch_environment(os.environ).size)
    from unigrad_fast.training import trainer

    trainer.pretrain(config, verbose=options.verbose)


class EvaluateKNN(Node):
    """Weighted nearest-neighbour accuracy of a run's online backbone."""

    run: AbsolutePath
    """Folder of the run."""
    baselines: bool = False
    """Judge raw pixels, colour histograms and the untrained encoder beside it."""


def evaluate_knn(options: EvaluateKNN) -> None:
    if not holds_run(options.run):
        raise UserError(f"run = {options.run}: no run there (no config.yaml); give a folder that pretrain wrote")
    require_dali()
    from unigrad_fast.evaluation import command

    command.evaluate_knn(options.run, options.baselines)


class DataSynth(Node):
    """Draw the built-in labelled JPEG images, with the folders train and val."""

    folder: AbsolutePath
    """New folder for the images."""
    seed: int = Field(default=0, ge=0, le=2**32 - 1)
    """Seed of the drawing; the same seed draws the same files."""


def data_synth(options: DataSynth) -> None:
    from unigrad_fast import synthetic

    folder = synthetic.draw(options.folder, options.seed)
    print(f"{len(synthetic.CLASSES)} classes of drawn images in {folder}/train and {folder}/val")


def require_dali() -> None:
    """Raises UserError when DALI, which the user chooses by CUDA version, is not installed."""
    if importlib.util.find_spec("nvidia") is None or importlib.util.find_spec("nvidia.dali") is None:
        raise UserError(
            "DALI, which decodes the images, is not installed; type `pip install nvidia-dali-cuda130`, or "
            "`nvidia-dali-cuda120` beside a torch for CUDA 12 (without a GPU either will do)"
        )


COMMANDS: dict[str, tuple[type[Node], Callable[[Any], None]]] = {
    "pretrain": (Pretrain, pretrain),
    "evaluate knn": (EvaluateKNN, evaluate_knn),
    "data synth": (DataSynth, data_synth),
}


def overview() -> str:
    """Text of `unigrad-fast --help`."""
    rows = "\n".join(f"  {usage(name):32}{options.__doc__}" for name, (options, _) in COMMANDS.items())
    return f"""usage: unigrad-fast COMMAND [--key value ...]

{unigrad_fast.__doc__}

commands:
{rows}

`unigrad-fast COMMAND --help` lists the keys of a command. Recipes: {", ".join(recipe_names())}."""


def positionals(options: type[Node]) -> list[str]:
    """Arguments that are written without their key: the required ones."""
    return [name for name, field in options.model_fields.items() if field.is_required()]


def usage(name: str) -> str:
    """A command's name with its positional arguments."""
    return " ".join([name, *(argument.upper() for argument in positionals(COMMANDS[name][0]))])


def split_command(words: Sequence[str]) -> tuple[str, Sequence[str]]:
    """The command that the words begin with, and the words behind it."""
    for name in COMMANDS:
        length = len(name.split())
        if list(words[:length]) == name.split():
            return name, words[length:]
    given = " ".join(itertools.takewhile(lambda word: not word.startswith("-"), words)) or words[0]
    close = difflib.get_close_matches(given, COMMANDS, n=1, cutoff=0.4)
    hint = f"did you mean {close[0]}?" if close else f"commands are {', '.join(COMMANDS)}"
    raise UserError(f"{given}: unknown command; {hint}")


def show_help(name: str, tree: Mapping[str, Any]) -> None:
    """Prints a command's keys and their defaults, for pretrain those of the recipe beside --help."""
    options, _ = COMMANDS[name]
    defaults = {"default": resolve(tree.get("recipe"), model=options)} if issubclass(options, Config) else {}
    tyro.cli(
        options,
        prog=f"unigrad-fast {name}",
        args=["--help"],
        use_underscores=True,
        config=(tyro.conf.FlagConversionOff, tyro.conf.PositionalRequiredArgs),
        **defaults,
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
        show_help(name, tree)
    elif issubclass(options, Config):
        command(resolve(overrides=tree, model=options))
    else:
        command(validate(options, tree))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    words = sys.argv[1:] if arguments is None else arguments
    # The deepspeed launcher adds this; LOCAL_RANK says the same.
    words = [word for word in words if not word.startswith("--local_rank=")]
    rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
    prefix = "error" if rank == "0" else f"error on rank {rank}"
    try:
        run(words or ["--help"])
    except (UserError, DataError) as error:
        print(*(f"{prefix}: {line}" for line in str(error).splitlines()), sep="\n", file=sys.stderr)
        return 2
    except RunStopped as error:
        print(f"stopped: {error}", file=sys.stderr)
        return 3
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM):
            raise
        print(f"stopped: {error.filename or 'a file'} cannot be written: {error.strerror}", file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0
