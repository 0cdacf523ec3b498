"""The pages that a user reads, and the code on them."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/ROOFLINE.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
RUN = re.compile(r"^<!-- run -->\n```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?:(?<=\n\n)|\A)(?: {4}.*\n(?:\n(?= {4}))?)+")


def kept_from_git(folder: Path) -> bool:
    """Whether all that commands have written to a folder would be ignored by git in a checkout."""
    patterns = [line.strip("/") for line in (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()]
    return all(any(fnmatch(path.name, pattern) for pattern in patterns) for path in folder.iterdir())


def fences(page: Path) -> list[tuple[str, str]]:
    """What the fenced blocks are marked as, and what is in them."""
    text = page.read_text(encoding="utf-8")
    return [(kind, textwrap.dedent(code)) for _, kind, code in FENCE.findall(text)]


def python_blocks(page: Path) -> list[str]:
    return [code for kind, code in fences(page) if kind == "python"]


def shell_lines(page: Path) -> Iterator[str]:
    """Every line of the blocks for a shell, marked or indented, continued ones as one; outputs may be among them."""
    text = page.read_text(encoding="utf-8")
    blocks = [code for kind, code in fences(page) if kind == "sh"]
    blocks += [textwrap.dedent(block) for block in INDENTED.findall(FENCE.sub("", text))]
    for block in blocks:
        yield from _lines(block)


def run_lines(page: Path) -> list[str]:
    """Every line of the blocks that are marked to be run."""
    return [line for block in RUN.findall(page.read_text(encoding="utf-8")) for line in _lines(block)]


def _lines(block: str) -> list[str]:
    """With continued ones as one."""
    return block.replace("\\\n", " ").splitlines()


def named_commands(page: Path) -> list[str]:
    """Commands of ours that stand in the text, between backquotes."""
    text = INDENTED.sub("", FENCE.sub("", page.read_text(encoding="utf-8")))
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", text)]
