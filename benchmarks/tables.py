"""Tables of measurements on the terminal."""

from __future__ import annotations

from collections.abc import Mapping

from rich.table import Table


def table_of_figures(*headers: str, **style: object) -> Table:
    """A table whose first column says what was measured; the others hold figures."""
    table = Table(*headers, **style)
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def median_and_range(row: Mapping, digits: int, prefix: str = "") -> tuple[str, str]:
    """Two cells of a row's spread; `prefix` stands before the keys of another one than its first."""
    median, least, most = (f"{row[prefix + key]:,.{digits}f}" for key in ("median", "least", "most"))
    return median, f"{least} to {most}"
