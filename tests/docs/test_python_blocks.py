"""The Python on the pages runs as it stands."""

from __future__ import annotations

import pytest
from drawn_images import draw_tree
from pages import PAGES, ROOT, kept_from_git, python_blocks

# Blocks that want more than to be run are run by tests of their own.
ELSEWHERE = {
    "own_loop.md": "tests/objectives/test_own_loop.py",
    "methods.md": "tests/objectives/test_rows.py",
    "pieces.md": "tests/docs/test_pieces.py",
}
BLOCKS = [
    pytest.param(code, id=f"{page.name}-{number}")
    for page in PAGES
    if page.name not in ELSEWHERE
    for number, code in enumerate(python_blocks(page))
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the images lie that the pages speak of."""
    root = tmp_path_factory.mktemp("reader")
    draw_tree(root / "data/quickstart/train", per_class=32)
    return root


@pytest.mark.parametrize("code", BLOCKS)
def test_a_block_runs_as_it_stands(code, folder, monkeypatch):
    monkeypatch.chdir(folder)
    exec(compile(code, "block", "exec"), {"__name__": "__main__"})
    assert kept_from_git(folder)


def test_blocks_that_are_left_out_here_are_run_elsewhere():
    for page, test in ELSEWHERE.items():
        assert f"docs/{page}" in (ROOT / test).read_text(encoding="utf-8")
        assert python_blocks(ROOT / "docs" / page)
