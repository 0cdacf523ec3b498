"""Tables on the terminal."""

from __future__ import annotations

from rich.table import Table


def table_of_figures(*headers: str, **style: object) -> Table:
    """A table whose first column names what was measured and whose other columns are right-aligned figures."""
    table = Table(*headers, **style)
    for column in table.columns[1:]:
        column.justify = "right"
    return table
