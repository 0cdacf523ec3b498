"""Standard output as people have it: narrow, without our characters, closed, full, or with nobody who reads it."""

from __future__ import annotations

import ast
import fcntl
import io
import os
import pty
import shutil
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from drawn_images import draw_tree
from forked import start
from thin import thin

from unigrad_fast.runtime import console, fallback

ROOT = Path(__file__).resolve().parents[2]


def in_a_process(function: Callable, *arguments: object, **variables: str) -> int:
    process = start(function, *arguments, environment=variables)
    process.join(300)
    return process.exitcode


def run(stdout: int | None, stderr: str, words: tuple[str, ...]) -> None:
    """A command whose standard output is a descriptor's file, or closed."""
    os.dup2(os.open(stderr, os.O_WRONLY | os.O_CREAT), 2)
    os.close(1) if stdout is None else os.dup2(stdout, 1)
    sys.stdout = sys.__stdout__ if stdout is not None else None
    from unigrad_fast.cli import main

    status = main(words)
    print("after the command")
    sys.stdout.flush()
    os._exit(status)


def run_with_broken_pipe(stderr: str, words: tuple[str, ...]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    run(writing, stderr, words)


def run_on_closed_terminal(stderr: str, words: tuple[str, ...]) -> None:
    ours, theirs = pty.openpty()
    os.close(ours)
    run(theirs, stderr, words)


def run_on_full_disk(stderr: str, words: tuple[str, ...]) -> None:
    run(os.open("/dev/full", os.O_WRONLY), stderr, words)


def run_closed(stderr: str, words: tuple[str, ...]) -> None:
    run(None, stderr, words)


@pytest.mark.parametrize("ending", [run_with_broken_pipe, run_on_closed_terminal, run_closed])
@pytest.mark.parametrize("words", [("data", "presets"), ("--help",)])
def test_a_command_that_nobody_reads_ends_as_it_would_have_and_quietly(tmp_path, ending, words):
    assert in_a_process(ending, str(tmp_path / "stderr"), words) == 0
    assert (tmp_path / "stderr").read_text() == ""


def train_on_closing_terminal(stderr: str, words: tuple[str, ...]) -> None:
    """The terminal is closed when the run has begun, while its progress bar is shown."""
    ours, theirs = pty.openpty()

    def read() -> None:
        seen = b""
        while b"run folder" not in seen:
            seen += os.read(ours, 4096)
        os.close(ours)

    threading.Thread(target=read, daemon=True).start()
    with thin():
        run(theirs, stderr, words)


def train_with_broken_pipe(stderr: str, words: tuple[str, ...]) -> None:
    with thin():
        run_with_broken_pipe(stderr, words)


RECIPE = """
recipe: cifar_subset
data: {batch_size: 16, image_size: 16, threads: 1}
model: {projector: {depth: 1, width: 32}}
schedule: {epochs: 2}
evaluation: {every: 0}
telemetry: {tensorboard: false}
"""


@pytest.mark.parametrize("ending", [train_with_broken_pipe, train_on_closing_terminal])
def test_training_goes_on_when_nobody_sees_it(tmp_path, ending):
    draw_tree(tmp_path / "train", per_class=24)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    words = ("pretrain", "--recipe", tmp_path / "recipe.yaml", "--data.train", tmp_path / "train")
    words = tuple(map(str, (*words, "--output", tmp_path / "run")))
    assert in_a_process(ending, str(tmp_path / "stderr"), words, TERM="xterm") == 0
    assert (tmp_path / "stderr").read_text() == ""
    log = (tmp_path / "run/log.txt").read_text(encoding="utf-8")
    assert "run folder" in log and "finished: " in log and "stopped" not in log
    assert (tmp_path / "run/checkpoints/step-00000006").is_dir() and (tmp_path / "run/summary.json").is_file()


def test_output_that_cannot_be_kept_is_said(tmp_path):
    assert in_a_process(run_on_full_disk, str(tmp_path / "stderr"), ("data", "presets")) == 3
    (line,) = (tmp_path / "stderr").read_text().splitlines()
    assert line.startswith("stopped: standard output cannot be written: No space left on device; ")


def run_shown(file: str, encoding: str, words: tuple[str, ...]) -> None:
    os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), 1)
    sys.stdout = sys.__stdout__ = open(1, "w", encoding=encoding, closefd=False)  # noqa: SIM115
    from unigrad_fast.cli import main

    sys.exit(main(words))


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_text_falls_back_to_what_an_encoding_has(tmp_path, encoding):
    assert in_a_process(run_shown, str(tmp_path / "stdout"), encoding, ("data", "presets")) == 0
    text = (tmp_path / "stdout").read_bytes().decode(encoding)
    assert "multicrop" in text and "\\u" not in text
    assert ("–" in text) == (encoding == "utf-8")


def test_every_character_of_ours_has_a_twin():
    """In all texts, for docstrings of commands are shown as help."""
    texts = []
    for folder in ("unigrad_fast", "pipelines", "benchmarks"):
        for file in (ROOT / folder).rglob("*.py"):
            if file.name != "fallback.py":
                tree = ast.parse(file.read_text(encoding="utf-8"))
                texts += [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    characters = {
        character
        for text in texts
        if isinstance(text, str)
        for character in text
        if "\xa0" <= character < "\ud000"  # the others stand for control, names and damage, and are not shown
    }
    assert len(characters) > 5
    assert [character for character in characters if "\\" in fallback.twin(character)] == []


def test_names_that_are_no_text_can_be_printed_everywhere():
    name = os.fsdecode(b"caf\xe9")
    assert fallback.printable(name) == "caf\\xe9"
    for encoding in ("utf-8", "ascii", "latin-1"):
        assert name.encode(encoding, fallback.NAME) == b"caf\\xe9"


@pytest.mark.parametrize(
    ("encoding", "shown"), [("ascii", ["a -> b", "\\u6587"]), ("utf-8", ["a → b", "文"]), ("unknown", ["a → b", "文"])]
)
def test_text_of_a_table_is_fitted_to_standard_output(monkeypatch, encoding, shown):
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(encoding=encoding))
    assert [console.fitted("a → b"), console.fitted("文")] == shown


def test_what_steers_a_terminal_is_shown_as_codes(capfd):
    from unigrad_fast.cli import main

    assert main(["data", "scan", "no/\x1b[31mfolder\r\x9b"]) == 2
    out, err = capfd.readouterr()
    assert "no/\\x1b[31mfolder\\x0d\\x9b" in out and "no/\\x1b[31mfolder\\x0d\\x9b does not exist" in err
    assert not {"\x1b", "\r", "\x9b"} & {*out, *err}
    assert fallback.harmless("a line\n\tand another") == "a line\n\tand another"


def test_a_descriptor_that_is_full_for_now_is_waited_for():
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    content = os.urandom(1 << 18)
    child = subprocess.Popen(["cat"], stdin=reading, stdout=subprocess.PIPE)
    os.close(reading)
    outlet = io.BufferedWriter(console.Outlet(writing))
    thread = threading.Thread(target=lambda: (outlet.write(content), outlet.flush(), os.close(writing)))
    thread.start()
    assert child.stdout.read() == content
    thread.join()
    child.stdout.close()
    child.wait()


def size_in(environment: dict[str, str], columns: int, lines: int) -> None:
    """Exits with the columns that Rich and argparse see on a terminal of a size."""
    _ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    for number in range(3):
        os.dup2(theirs, number)
    os.environ.pop("COLUMNS", None)
    os.environ.update(environment)
    sys.stdout = sys.__stdout__
    console.take_over()
    width = console.new_console().size.width
    assert width == shutil.get_terminal_size().columns
    os._exit(width)


@pytest.mark.parametrize(
    ("environment", "columns", "seen"),
    [
        ({"TERM": "xterm"}, 100, 100),
        ({"TERM": "xterm"}, 1, 40),
        ({"TERM": "xterm"}, 0, 80),
        ({"TERM": "xterm", "COLUMNS": "0"}, 100, 100),
        ({"TERM": "xterm", "COLUMNS": "1", "LINES": "x"}, 100, 100),
        ({"TERM": "xterm", "COLUMNS": "9" * 5000, "NO_COLOR": "1"}, 100, 100),
        ({"TERM": "xterm", "COLUMNS": "60"}, 100, 60),
    ],
)
def test_sizes_that_make_no_sense_are_not_believed(environment, columns, seen):
    assert in_a_process(size_in, environment, columns, 1) == seen
