"""The site's tables of the configuration are those of the tree."""

from __future__ import annotations

import re

import yaml
from configuration_tables import keys_of_every_group
from pages import ROOT

from unigrad_fast.config import Config
from unigrad_fast.runtime.validation import keys


def rows() -> dict[str, list[str]]:
    lines = [line for line in keys_of_every_group().splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return {row[0].strip("`"): row[1:] for row in cells}


def test_every_key_has_a_row_with_meaning_range_default_and_where_it_comes_from():
    found = rows()
    assert list(found) and set(found) == set(keys(Config))
    assert all(len(row) == 4 and row[0] and row[1] and row[2] for row in found.values())
    assert found["data.batch_size"] == [
        "Images per optimizer step, over all ranks and accumulation steps.",
        "an integer from 2 to 16777216",
        "`1024`",
        "paper: 1024",
    ]
    assert found["model.stem"][1] == "one of imagenet, small"


def test_every_page_is_in_the_menu_of_the_site():
    menu = yaml.safe_load(re.sub(r"(?m)^hooks:.*$", "", (ROOT / "mkdocs.yml").read_text(encoding="utf-8")))["nav"]
    named = set(re.findall(r"[\w-]+\.md", str(menu)))
    assert {page.name for page in (ROOT / "docs").glob("*.md")} <= named
