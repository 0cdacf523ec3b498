"""What the pages say of the repository is there: links, sections, modules."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pages import PAGES, ROOT


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.fixture(params=PAGES, ids=lambda page: page.name)
def page(request) -> Path:
    return request.param


def test_local_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" in link:
            continue
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_modules_that_are_run_exist(page):
    for name in re.findall(r"-m (unigrad_fast(?:\.\w+)*)(?!\w|\.\w|\.\.)", page.read_text(encoding="utf-8")):
        path = name.replace(".", "/")
        beside = path.partition("/")[2]  # folders beside `unigrad_fast/` that are its subpackages
        places = (f"{path}.py", path, f"{beside}.py", f"{beside}/__main__.py")
        assert any((ROOT / each).exists() for each in places), name
