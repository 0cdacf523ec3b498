"""The Python on the pages runs as it stands."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
from drawn_images import draw_tree
from pages import PAGES, ROOT, kept_from_git, python_blocks
from thin import thin

# Blocks that want more than to be run are run by tests of their own.
ELSEWHERE = {
    "own_loop.md": "tests/objectives/test_own_loop.py",
    "methods.md": "tests/objectives/test_rows.py",
    "pieces.md": "tests/docs/test_pieces.py",
}
TRAINED = ("README.md", "python.md")  # pages on which a network is trained: here a thin one
BLOCKS = [
    pytest.param(page.name, code, id=f"{page.name}-{number}")
    for page in PAGES
    if page.name not in ELSEWHERE
    for number, code in enumerate(python_blocks(page))
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the images lie that the pages speak of."""
    root = tmp_path_factory.mktemp("reader")
    for part, images in (("train", 32), ("val", 8)):
        draw_tree(root / "data/quickstart" / part, per_class=images)
    return root


@pytest.mark.parametrize(("page", "code"), BLOCKS)
def test_a_block_runs_as_it_stands(page, code, folder, monkeypatch):
    monkeypatch.chdir(folder)
    with thin() if page in TRAINED else nullcontext():
        exec(compile(code, "block", "exec"), {"__name__": "__main__"})
    assert kept_from_git(folder)


def test_blocks_that_are_left_out_here_are_run_elsewhere():
    for page, test in ELSEWHERE.items():
        assert f"docs/{page}" in (ROOT / test).read_text(encoding="utf-8")
        assert python_blocks(ROOT / "docs" / page)
