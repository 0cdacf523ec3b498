"""The figures of measurements on the pages are those of the rows that they name."""

from __future__ import annotations

import re

import measured_tables
import pytest
from pages import PAGES, ROOT

PAGES_WITH_TABLES = [page for page in PAGES if "<!-- measured: " in page.read_text(encoding="utf-8")]


@pytest.mark.parametrize("page", PAGES_WITH_TABLES, ids=lambda page: page.name)
def test_the_tables_of_a_page_are_made_of_the_rows_they_name(page):
    text = page.read_text(encoding="utf-8")
    assert measured_tables.written_anew(text) == text, "python docs/measured_tables.py writes the tables anew"
    assert text.count("<!-- measured: ") == len(measured_tables.TABLE.findall(text))


def test_every_table_of_the_measurements_names_its_rows():
    """But for those without a figure."""
    text = (ROOT / "docs/measurements.md").read_text(encoding="utf-8")
    elsewhere = {"summary", "wide", "every_method"}
    named = {name for _, name, *_ in measured_tables.TABLE.findall(text)}
    assert named == measured_tables.TABLES.keys() - elsewhere
    rest = measured_tables.TABLE.sub("", text)
    cells = [line for line in rest.splitlines() if line.startswith("|") and "---" not in line]
    assert not [line for line in cells if re.search(r"\|\s*\**\d[\d.,]*\**\s*\|", line)]


def test_a_figure_that_no_row_has_is_found():
    text = (ROOT / "docs/measurements.md").read_text(encoding="utf-8")
    changed = text.replace("| **656** |", "| **655** |")
    assert changed != text == measured_tables.written_anew(changed)


def test_a_row_that_is_not_there_is_named():
    with pytest.raises(KeyError, match=r"step\.jsonl has no row of 2020"):
        measured_tables.rows(["benchmarks/results/step.jsonl", "2020"])


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150
