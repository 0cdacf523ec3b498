"""Files and tests that pages, docstrings and comments name exist."""

from __future__ import annotations

import ast
import io
import itertools
import re
import tokenize
from pathlib import Path

import pytest
from pages import ROOT

FOLDERS = ("benchmarks", "docs", "examples", "kernels", "pipelines", "tests", "unigrad_fast")
FILES = [file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*")) if file.is_file()]
FILES += [file for file in sorted(ROOT.iterdir()) if file.is_file()]
TEXTS = [file for file in FILES if file.suffix in (".md", ".py")]
# A path from the root of the repository, with the test in it.
PATH = re.compile(rf"(?<![\w/.-])((?:{'|'.join(FOLDERS)})/[\w./{{}},*-]+)(?:::(\w+))?")
# A module by the end of its path.
MODULE = re.compile(r"(?<![\w/.{}*-])([\w/]+\.py)\b(?:::(\w+))?")
OF_THE_READER = {"own_loop.py"}


def prose(file: Path) -> str:
    """A page, or the docstrings and comments of a module."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".md":
        return text
    comments = [
        token.string for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type == tokenize.COMMENT
    ]
    alone = [node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr)]
    strings = [node.value for node in alone if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return "\n".join([*comments, *strings])


def expanded(path: str) -> list[str]:
    """`a/{b,c}.py` as the shell has it."""
    parts = re.split(r"\{([^}]*)\}", path)
    choices = [part.split(",") if place % 2 else [part] for place, part in enumerate(parts)]
    return ["".join(chosen) for chosen in itertools.product(*choices)]


def defines(file: Path, name: str) -> bool:
    return bool(re.search(rf"(?m)^\s*(?:def|class) {name}\b", file.read_text(encoding="utf-8")))


def stale(text: str) -> list[str]:
    """What a text names and the repository does not have."""
    found = []
    for path, test in PATH.findall(text):
        for name in expanded(path.rstrip(".,")):
            files = list(ROOT.glob(name))
            if not files or (test and not any(defines(file, test) for file in files)):
                found.append("::".join(filter(None, (name, test))))
    for name, test in MODULE.findall(text):
        files = [file for file in FILES if f"/{file.relative_to(ROOT)}".endswith(f"/{name}")]
        if name not in OF_THE_READER and not any(not test or defines(file, test) for file in files):
            found.append("::".join(filter(None, (name, test))))
    return found


@pytest.mark.parametrize("folder", ["", *FOLDERS])
def test_files_and_tests_that_are_named_exist(folder):
    texts = [file for file in TEXTS if str(file.relative_to(ROOT).parent).partition("/")[0] == (folder or ".")]
    assert texts
    assert not {str(file.relative_to(ROOT)): found for file in texts if (found := stale(prose(file)))}


@pytest.mark.parametrize(
    "text", ["See docs/gone.md.", "kernels/{ops,gone}.py", "`gone.py`", "tests/docs/pages.py::gone"]
)
def test_a_file_or_test_that_is_gone_is_found(text):
    assert stale(text)


def test_those_that_exist_are_no_problem():
    named = "kernels/{ops,gradient}.py, `ops.py`, docs/*.md, tests/..., tests/docs/test_references.py::stale."
    assert not stale(named)
