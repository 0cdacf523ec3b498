"""The tables of docs/wide.md are what the code counts."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import wide_table
from wide_table import CARDS, WIDTHS, Setting

PAGE = Path(__file__).resolve().parents[2] / "docs/wide.md"


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("|").split("|")]


def written(header: str) -> dict[tuple[str, str], list[str]]:
    """The rows under a header, by their first two cells."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    place = lines.index(header) + 2
    end = next((n for n in range(place, len(lines)) if not lines[n].startswith("|")), len(lines))
    return {tuple(row[:2]): row for row in map(cells, lines[place:end])}


def assert_alike(found: Iterable[str], expected: Iterable[str]) -> None:
    """Numbers may differ by 2 %, as other versions of torch count."""
    for ours, theirs in zip(found, expected, strict=True):
        for one, other in zip(ours.split(", "), theirs.split(", "), strict=True):
            try:
                assert float(one) == pytest.approx(float(other), rel=0.02, abs=0.011)
            except ValueError:
                assert one == other


def test_the_page_has_every_width_on_every_number_of_cards():
    rows = written(wide_table.SIZES)
    assert list(rows) == [(str(width), str(ranks)) for width in WIDTHS for ranks in CARDS]
    for (width, ranks), row in rows.items():
        assert_alike(row[-3:], wide_table.objective_cells(int(width), int(ranks)))


def test_the_page_says_what_the_projector_keeps():
    rows = written(wide_table.RECOMPUTED)
    assert {width for width, _ in rows} == {str(width) for width in WIDTHS if width != 4096}
    for (width, views), row in rows.items():
        counted = (wide_table.kept(int(width), int(views), again) for again in (False, True))
        assert_alike(row[2:4], [f"{size / 1e9:.2f}" for size in counted])


@pytest.mark.slow
def test_all_rows_are_what_the_dry_run_counts():
    for (width, ranks), row in written(wide_table.SIZES).items():
        assert_alike(cells(wide_table.size_row(int(width), int(ranks))), row)
    for (width, views), row in written(wide_table.RECOMPUTED).items():
        assert_alike(cells(wide_table.recomputed_row(int(width), multi_crop=int(views) > 2)), row)


def test_the_table_counts_the_recipe_of_its_title():
    config = Setting(16384, 8, stage=2).config()
    assert (config.data.batch_size, config.model.backbone, config.model.projector.width) == (1024, "resnet50", 16384)
