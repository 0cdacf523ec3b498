"""What the functions return: results and tables, readable in a terminal and in a notebook."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

from unigrad_fast.runtime.outputs import Written, judged

MOST_ROWS = 8  # of a table that are shown


class Displayed:
    """What is in a file or folder `path`, which stands for it, and is shown as rows of names and values."""

    path: Path

    def __fspath__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name} {value}' for name, value in self._rows())})"

    def _repr_html_(self) -> str:
        return in_html(self._rows())

    def _rows(self) -> list[tuple[str, str]]:
        raise NotImplementedError


class Picture:
    """A picture in a file, which a notebook shows."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __fspath__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return f"Picture({str(self.path)!r})"

    def _repr_png_(self) -> bytes:
        return self.path.read_bytes()


class Result(Displayed):
    """What a command has written.

    Attributes:
        path: the file.
        settings: what the result is valid for: weights, images, protocol and its values.
        figures: the result itself.
        accuracy, top5: percent of the validation images; None where nothing is judged, or top-5 makes no sense.
        picture: its picture; None if it has none.
    """

    def __init__(self, written: Written) -> None:
        self.path = written.path
        self.settings: Mapping[str, Any] = written.settings
        self.figures: Mapping[str, Any] = written.figures
        self.accuracy: float | None = judged(self.figures.get("accuracy"))
        self.top5: float | None = judged(self.figures.get("top5"))
        self.picture = None if written.picture is None else Picture(written.picture)

    def _rows(self) -> list[tuple[str, str]]:
        rows = [(name, self.settings[name]) for name in ("protocol", "k", "temperature") if name in self.settings]
        compared = self.figures.get("accuracy")
        accuracies = compared if isinstance(compared, Mapping) else {"accuracy": compared}
        rows += [(name, f"{value:.2f} %") for name, value in accuracies.items() if value is not None]
        rows += [] if self.top5 is None else [("top-5 accuracy", f"{self.top5:.2f} %")]
        return [(name, str(value)) for name, value in [*rows, ("path", self.path)]]


class Table(Sequence[Mapping[str, Any]]):
    """Rows with named columns: `table[-1]` is a row, `table["loss"]` a column, None where a row lacks it.

    `pandas.DataFrame(table)` takes it as it is.
    """

    def __init__(self, rows: Iterable[Mapping[str, Any]]) -> None:
        self._rows = list(rows)
        self.columns = list(dict.fromkeys(name for row in self._rows for name in row))

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, place: int) -> Mapping[str, Any]: ...
    @overload
    def __getitem__(self, place: slice) -> Table: ...
    @overload
    def __getitem__(self, place: str) -> list[Any]: ...
    def __getitem__(self, place: int | slice | str) -> Mapping[str, Any] | Table | list[Any]:
        if isinstance(place, str):
            if place not in self.columns:
                raise KeyError(f"{place}: no such column; there are {', '.join(self.columns) or 'none'}")
            return [row.get(place) for row in self._rows]
        return Table(self._rows[place]) if isinstance(place, slice) else self._rows[place]

    def __repr__(self) -> str:
        last = "" if not self._rows else ", last " + ", ".join(f"{k} {_short(v)}" for k, v in self._rows[-1].items())
        return f"Table({len(self)} rows{last})"

    def _repr_html_(self) -> str:
        left_out = max(0, len(self) - MOST_ROWS)
        shown = [[_short(row.get(name)) for name in self.columns] for row in self._rows[left_out:]]
        note = f"<p>the last {MOST_ROWS} of {len(self):,} rows</p>" if left_out else ""
        return note + in_html(shown, self.columns)


def in_html(rows: Iterable[Iterable[str]], headers: Iterable[str] = ()) -> str:
    """A table of texts, which may hold anything."""
    head = "".join(f"<th>{html.escape(header)}</th>" for header in headers)
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(text)}</td>' for text in row)}</tr>" for row in rows)
    return f"<table>{f'<thead><tr>{head}</tr></thead>' if head else ''}<tbody>{body}</tbody></table>"


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "–" if value is None else str(value)
