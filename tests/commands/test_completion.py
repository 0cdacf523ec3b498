"""Completion on TAB, in the shells themselves."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from unigrad_fast import cli
from unigrad_fast.runtime.validation import keys

# The start of an interactive shell; Ctrl-O prints the line that is being edited.
START = {
    "bash": r"""bind 'set bell-style none'; bind 'set page-completions off'; bind 'set completion-query-items 0'
bind 'set show-all-if-ambiguous on'; bind 'set enable-bracketed-paste off'
said() { printf '[[%s]]' "$READLINE_LINE"; }; bind -x '"\C-o": said'
""",
    "zsh": """LISTMAX=100000; unsetopt prompt_cr prompt_sp; bindkey -e; autoload -U compinit; compinit -u -D
said() { print -rn -- "[[$BUFFER]]"; }; zle -N said; bindkey '^O' said
""",
}
OPTIONS = {"bash": ["--norc", "--noprofile", "-i"], "zsh": ["-f", "-i"]}
# What each shell would complete after the words of a command, one a line.
WORDS = {
    "bash": """_unigrad_fast_table NAME; printf '%s' "$arguments" """,
    "zsh": """words=(unigrad-fast NAME ''); CURRENT=$#words; _arguments() { print -l -- $@ }; _unigrad-fast""",
    "fish": "complete -C 'unigrad-fast NAME --'",
}


class Shell:
    """An interactive shell with our script, at a pseudo-terminal."""

    def __init__(self, name: str, script: Path, folder: Path):
        self.terminal, inner = pty.openpty()
        environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "TERM": "dumb", "LC_ALL": "C.UTF-8"}
        streams = {"stdin": inner, "stdout": inner, "stderr": inner}
        self.process = subprocess.Popen(
            [name, *OPTIONS[name]], cwd=folder, env=environment, start_new_session=True, **streams
        )
        os.close(inner)
        self._write(f"stty rows 1000 cols 200; PS1=; {START[name]}source {script}; echo be''gun\n")
        self._read("begun")

    def tab(self, line: str) -> str:
        """The line after TAB at its end."""
        return self._typed(line)[1]

    def listed(self, line: str) -> set[str]:
        """What TAB lists below a line that it leaves as it is."""
        said, completed = self._typed(line)
        assert completed == line
        below = said.partition("[[")[0].split("\n")[1:]
        return {word for row in below if row.strip() != line.strip() for word in row.split()}

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.terminal)

    def _typed(self, line: str) -> tuple[str, str]:
        self._write(f"\x15{line}\t\x0f")  # Ctrl-U, the line, TAB, Ctrl-O
        said = self._read(r"\[\[.*?\]\]").replace("\r", "")
        return said, re.search(r"\[\[(.*?)\]\]", said, re.DOTALL)[1]

    def _write(self, text: str) -> None:
        os.write(self.terminal, text.encode())

    def _read(self, pattern: str) -> str:
        said, until = "", time.monotonic() + 60
        while not re.search(pattern, said, re.DOTALL):
            if not select.select([self.terminal], [], [], max(0, until - time.monotonic()))[0]:
                raise TimeoutError(said)
            said += os.read(self.terminal, 65536).decode()
        return said


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Where the commands are typed."""
    folder = tmp_path_factory.mktemp("here")
    for name in ("runs/first", "pictures/it's mine: old"):
        (folder / name).mkdir(parents=True)
    for name in ("mine.yaml", "own recipe.yml", "notes.txt"):
        (folder / name).touch()
    return folder


@pytest.fixture(scope="module")
def scripts(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("scripts")
    found = {name: folder / f"script.{name}" for name in WORDS}
    for name, file in found.items():
        with file.open("w", encoding="utf-8") as stream, contextlib.redirect_stdout(stream):
            assert cli.main(["completion", name]) == 0
    return found


def require(name: str) -> None:
    if not shutil.which(name):
        pytest.skip(f"{name} is not installed; on Debian: sudo apt install {name}")


@pytest.fixture(scope="module", params=START)
def shell(request, scripts, folder) -> Iterator[Shell]:
    require(request.param)
    shell = Shell(request.param, scripts[request.param], folder)
    yield shell
    shell.end()


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("pre", "pretrain"),
        ("evaluate ret", "evaluate retrieve"),
        ("completion z", "completion zsh"),
        ("--vers", "--version"),
        ("pretrain --data.bat", "pretrain --data.batch_size"),
        ("evaluate knn --bas", "evaluate knn --baselines"),
        ("pretrain --data.preset mu", "pretrain --data.preset multicrop"),
        ("pretrain --data.preset=mu", "pretrain --data.preset=multicrop"),
        ("pretrain --data.preset byol --objective.meth", "pretrain --data.preset byol --objective.method"),
        ("pretrain --fresh t", "pretrain --fresh true"),
        ("pretrain --fresh --print", "pretrain --fresh --print_config"),
        ("pretrain --recipe imagenet_800ep_cutmix_m", "pretrain --recipe imagenet_800ep_cutmix_multicrop"),
        ("pretrain --recipe=qu", "pretrain --recipe=quickstart"),
        ("plan --recipe mi", "plan --recipe mine.yaml"),
        ("plan --recipe own", r"plan --recipe own\ recipe.yml"),
        ("pretrain --data.train pic", "pretrain --data.train pictures/"),
        ("pretrain --data.train=pic", "pretrain --data.train=pictures/"),
        ("evaluate knn runs/f", "evaluate knn runs/first/"),
        ("evaluate features --checkpoint 3 runs/first n", "evaluate features --checkpoint 3 runs/first notes.txt"),
        ("evaluate retrieve runs/first one.png n", "evaluate retrieve runs/first one.png notes.txt"),
        ("bench methods --methods moco,simclr,vic", "bench methods --methods moco,simclr,vicreg"),
    ],
)
def test_a_word_that_has_been_begun_is_completed(shell, typed, completed):
    # A shell adds what separates the word from the next one: a space, or = or a comma, which it takes back.
    assert shell.tab(f"unigrad-fast {typed}").rstrip(" =,") == f"unigrad-fast {completed}"


def test_a_name_with_a_space_a_quote_and_a_colon_is_quoted(shell):
    completed = shell.tab("unigrad-fast data scan pictures/i")
    assert re.sub(r"\\(.)", r"\1", completed).strip() == "unigrad-fast data scan pictures/it's mine: old/"
    assert r"it\'s\ mine" in completed


@pytest.mark.parametrize(
    ("typed", "listed"),
    [
        ("pretrain --data.decode ", {"auto", "cpu", "gpu"}),
        ("pretrain --data.decode=", {"auto", "cpu", "gpu"}),
        ("pretrain --data.global_views.interpolation bi", {"bilinear", "bicubic"}),
        ("data preview mine.yaml --seed 1 --preset s", {"simsiam", "swav"}),
        ("evaluate linear --keep_features=", {"true", "false"}),
        ("pretrain --seed ", set()),
    ],
)
def test_the_values_of_a_key_are_listed(shell, typed, listed):
    assert shell.listed(f"unigrad-fast {typed}") == listed


def test_commands_of_a_group_are_listed(shell):
    assert shell.listed("unigrad-fast checkpoint ") >= {"show", "verify"}  # zsh describes them


@pytest.mark.parametrize("given", ["--data.preset byol", "--data.preset=byol"])
def test_a_key_is_not_offered_twice(shell, given):
    line = f"unigrad-fast pretrain {given} --data.pres"
    assert shell.tab(line) == line


def test_bash_lists_groups_before_their_keys(scripts, folder):
    shell = Shell("bash", scripts["bash"], folder)
    assert shell.listed("unigrad-fast pretrain --") >= {"--data.", "--model.", "--seed"}
    assert shell.tab("unigrad-fast pretrain --mod") == "unigrad-fast pretrain --model."
    assert "--model.projector." in shell.listed("unigrad-fast pretrain --model.")
    shell.end()


@pytest.mark.parametrize("name", WORDS)
def test_a_script_has_every_command_with_its_keys(name, scripts):
    require(name)
    lines = [WORDS[name].replace("NAME", command) + "; echo; echo END" for command in cli.COMMANDS]
    program = "\n".join(["compdef() { }" * (name == "zsh"), f"source {scripts[name]}", *lines])
    said = subprocess.run([name, "-c", program], capture_output=True, text=True, check=True)
    *parts, rest = said.stdout.split("\nEND\n")
    assert (len(parts), rest, said.stderr) == (len(cli.COMMANDS), "", "")
    for (command, (options, _)), part in zip(cli.COMMANDS.items(), parts, strict=True):
        offered = set(re.findall(r"^--([\w.]+)", part, re.MULTILINE))
        assert offered == {*keys(options), "help"} - cli.positionals(options).keys(), command


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("pre", ["pretrain"]),
        ("evaluate f", ["features", "finetune"]),
        ("pretrain --data.bat", ["--data.batch_size"]),
        ("pretrain --data.preset mu", ["multicrop"]),
        ("pretrain --data.preset=mu", ["--data.preset=multicrop"]),
        ("pretrain --data.preset byol --data.pres", []),
        ("pretrain --data.preset=byol --data.pres", []),
        ("pretrain --fresh --print", ["--print_config"]),
        ("pretrain --recipe=qu", ["--recipe=quickstart"]),
        ("plan --recipe own", ["own recipe.yml"]),
        ("pretrain --data.train pic", ["pictures/"]),
        ("evaluate knn ", ["pictures/", "runs/"]),
        ("evaluate knn runs/first ", []),
        ("evaluate features --checkpoint 3 runs/first n", ["notes.txt"]),
        ("evaluate retrieve runs/first one.png n", ["notes.txt"]),
        ("bench methods --methods moco,by", ["moco,byol", "moco,byol_directpred"]),
    ],
)
def test_fish_completes(typed, completed, scripts, folder):
    require("fish")
    program = f"source {scripts['fish']}; complete -C 'unigrad-fast {typed}'"
    said = subprocess.run(["fish", "--no-config", "-c", program], cwd=folder, capture_output=True, text=True)
    assert (said.stderr, [line.partition("\t")[0] for line in said.stdout.splitlines()]) == ("", completed)
