"""The page's table for one or two GPUs is what the planner says."""

from __future__ import annotations

from pathlib import Path

import lab_table
import pytest

PAGE = Path(lab_table.__file__).with_name("plan.md").read_text(encoding="utf-8")


def test_the_page_has_a_row_of_every_card_recipe_and_number():
    lines = PAGE.partition(f"{lab_table.HEAD}\n")[2].partition("\n\n")[0].splitlines()
    assert len(lines) - 1 == len(lab_table.CARDS) * len(lab_table.RECIPES) * len(lab_table.GPUS)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", lab_table.GPUS)
@pytest.mark.parametrize("recipe", lab_table.RECIPES)
def test_the_rows_are_what_the_planner_says(recipe, ranks):
    for row in lab_table.rows(recipe, ranks):
        assert row in PAGE
