"""Commands that are printed mean the same wherever they are pasted."""

import os
import subprocess

import pytest

from unigrad_fast.runtime.shell import typed

NAMES = ["plain", "my run (1)", "it's", "a$b`c`", "-x", "café", os.fsdecode(b"caf\xe9 '\\"), "two\nlines", ""]


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_pasted_command_has_the_words_that_were_meant(encoding):
    """Even where the terminal shows no other characters than ASCII."""
    words = [name for name in NAMES if encoding == "utf-8" or name != "café"]
    line = typed("printf", "%s\\0", *words).encode(encoding)
    shown = subprocess.run(["bash"], input=line, capture_output=True, check=True)
    assert shown.stdout.split(b"\0")[:-1] == [os.fsencode(word) for word in words]
