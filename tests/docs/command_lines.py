"""Resolves a line of a shell block against the options that there are, without doing what it says."""

from __future__ import annotations

import itertools
import re
import shlex
from importlib.util import find_spec
from pathlib import Path

from torch.distributed.run import get_args_parser

from unigrad_fast import cli
from unigrad_fast.config import Config, resolve
from unigrad_fast.runtime.errors import UserError
from unigrad_fast.runtime.trees import parse_arguments
from unigrad_fast.runtime.validation import validate

ROOT = Path(__file__).resolve().parents[2]
# A word in capitals stands for what the reader types, a variable of the shell for its values.
PLACEHOLDER = re.compile(r" = (?:[A-Z_]+|\$\w+): must be ")
LIKE_A_PATH = re.compile(r"[A-Z_]+|.*[./].*")
A_METHOD = "simclr"  # in place of METHOD


def problems(line: str, whole: bool = True) -> list[str]:
    """What is wrong with the commands of ours in a line; nothing where there are none.

    Args:
        whole: what a command needs has to be there, as in a line that is typed.
    """
    found = []
    for command in commands(line):
        try:
            found += _wrong(command, whole)
        except UserError as error:
            found += str(error).splitlines()
    return [problem for problem in found if not PLACEHOLDER.search(problem)]


def commands(line: str) -> list[list[str]]:
    """The words of each command; `[--key value]` is taken, of `one|other` each."""
    line = re.sub(r"(^|\s)#.*", "", line.removeprefix("$ "))
    if not re.search(r"unigrad[-_]fast|\bmake\b|\bpip install\b", line):
        return []
    line = line.replace("[", " ").replace("]", " ") if "pip install" not in line else line
    try:
        words = shlex.split(line)
    except ValueError:  # no line of a shell
        return []
    ended = [place for place, word in enumerate(words) if word in ("|", ">", "&&", ";", "...", "2>&1")]
    choices = [word.split("|") for word in words[: ended[0] if ended else None]]
    return [list(chosen) for chosen in itertools.product(*choices)]


def _wrong(words: list[str], whole: bool) -> list[str]:
    program = Path(words[0]).name if words else ""
    if program == "make":
        return _wrong_target(words[1:])
    if words[:2] == ["pip", "install"]:
        extras = re.findall(r"\[(\w+)\]", " ".join(words))
        return [f"{extra}: no extra of setup.py" for extra in extras if f'"{extra}": [' not in _text("setup.py")]
    if program == "unigrad-fast":
        return _wrong_options(words[1:], whole)
    for place, word in enumerate(words):
        if words[place - 1] in ("-m", "--module") and re.fullmatch(r"unigrad_fast[.\w]*", word):
            launcher = _wrong_launcher(words[:place]) if program == "torchrun" else []
            rest = words[place + 1 :]
            own = _wrong_options(rest, whole) if word == "unigrad_fast" else _wrong_script(word, rest)
            return [*launcher, *own]
    return []


def _wrong_options(words: list[str], whole: bool) -> list[str]:
    words = [word.replace("METHOD", A_METHOD) for word in words if word not in ("--help", "-h", "--version")]
    groups = {name.split()[0] for name in cli.COMMANDS}
    if not words or (not whole and len(words) == 1 and words[0] in groups):
        return []
    name, rest = cli.split_command(words)
    options, _ = cli.COMMANDS[name]
    tree = parse_arguments(rest, cli.positionals(options))
    if LIKE_A_PATH.fullmatch(str(tree.get("recipe", ""))):
        del tree["recipe"]
    try:
        if issubclass(options, Config):
            resolve(overrides=tree, model=options)
        else:
            validate(options, tree)
    except UserError as error:
        return [line for line in str(error).splitlines() if whole or ": missing; " not in line]
    return []


def _wrong_launcher(words: list[str]) -> list[str]:
    known = {option for action in get_args_parser()._actions for option in action.option_strings}
    return [f"{word}: no option of torchrun" for word in words if word.startswith("-") and word not in known]


def _wrong_script(module: str, words: list[str]) -> list[str]:
    if module.endswith("..."):  # any of them
        return []
    spec = find_spec(module)
    if spec is None:
        return [f"{module}: no such module"]
    if spec.submodule_search_locations:
        spec = find_spec(f"{module}.__main__")
    source = Path(spec.origin).read_text(encoding="utf-8")
    options = [word.partition("=")[0].removeprefix("--") for word in words if word.startswith("--")]
    return [f"--{key}: no option of {module}" for key in options if not re.search(rf"\b{key}\b", source)]


def _wrong_target(words: list[str]) -> list[str]:
    makefile = _text("Makefile")
    wrong = []
    for word in words:
        name, equals, _ = word.partition("=")
        if not re.search(rf"\$\({name}\)" if equals else rf"(?m)^{re.escape(name)}:", makefile):
            wrong.append(f"{word}: not in the Makefile")
    return wrong


def _text(file: str) -> str:
    return (ROOT / file).read_text(encoding="utf-8")
