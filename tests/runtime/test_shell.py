"""Commands that are printed mean the same wherever they are pasted."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from unigrad_fast.runtime.shell import own, typed

NAMES = ["plain", "my run (1)", "it's", "a$b`c`", "-x", "café", os.fsdecode(b"caf\xe9 '\\"), "two\nlines", ""]


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_pasted_command_has_the_words_that_were_meant(encoding):
    """Even where the terminal shows no other characters than ASCII."""
    words = [name for name in NAMES if encoding == "utf-8" or name != "café"]
    line = typed("printf", "%s\\0", *words).encode(encoding)
    shown = subprocess.run(["bash"], input=line, capture_output=True, check=True)
    assert shown.stdout.split(b"\0")[:-1] == [os.fsencode(word) for word in words]


@pytest.fixture
def environment(tmp_path, monkeypatch) -> Path:
    """The folder of an interpreter whose programs the shell does not find, below the current folder."""
    binaries = tmp_path / ".venv/bin"
    binaries.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(binaries / "python"))
    monkeypatch.setenv("PATH", os.defpath)
    return binaries


def test_a_command_of_ours_is_named_as_the_shell_finds_it(environment, tmp_path, monkeypatch):
    assert own("doctor") == f"{environment}/python -m unigrad_fast doctor"
    (environment / "unigrad-fast").touch(0o755)
    assert own("export", Path("my run")) == ".venv/bin/unigrad-fast export 'my run'"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert own("doctor") == f"{environment}/unigrad-fast doctor"
    monkeypatch.setenv("PATH", str(environment))
    assert own("doctor") == "unigrad-fast doctor"
