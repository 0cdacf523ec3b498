"""`unigrad-fast evaluate list`: all results of an encoder in one table."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.table import Table

from unigrad_fast.evaluation.results import read_results
from unigrad_fast.runtime.console import fitted, new_console
from unigrad_fast.runtime.errors import UserError
from unigrad_fast.runtime.outputs import judged
from unigrad_fast.runtime.validation import leaves, shown
from unigrad_fast.runtime.wording import percent

COLUMNS = ("protocol", "epoch", "top-1, %", "top-5, %", "what differs")
# Of a result: what has a column of its own, what is no setting, and what follows from others.
NO_SETTINGS = {
    "protocol", "epoch", "step", "accuracy", "top5", "deviation", "chosen", "counts", "versions", "data", "file",
    "images", "settings_of_fraction", "batch_norm",
}  # fmt: skip
DIGEST = 8  # characters that are shown of one


def show(folder: Path) -> list[dict[str, str]]:
    """Print the results of a run, or those in a folder of results; files that hold something else are named.

    Returns:
        The rows of the table, by the names of its columns.

    Raises:
        UserError: there are none.
    """
    console, results = new_console(quiet=False), read_results(folder)
    for name, problem in [(name, odd) for name, content in results.items() if (odd := _odd(content))]:
        console.print(f"warning: {name}.json left out: {problem}; correct or remove the file", soft_wrap=True)
        del results[name]
    if not results:
        raise UserError(f"{folder}: no results there; give the folder of a run that was evaluated, or of its results")
    table = Table(title=f"results in {folder}; comparable where protocol and what differs agree", title_justify="left")
    for column in COLUMNS:
        justify: Any = "right" if column.endswith("%") else "left"
        table.add_column(column, justify=justify, overflow="fold", no_wrap=column != "what differs")
    made = rows(results)
    for row in made:
        table.add_row(*map(fitted, row))
    console.print(table)
    return [dict(zip(COLUMNS, row, strict=True)) for row in made]


def rows(results: Mapping[str, dict[str, Any]]) -> list[tuple[str, ...]]:
    """A row of texts for each result, by protocol and epoch.

    "what differs" has the settings of which the results of the protocol have different values; "–" where one has none.
    """
    ordered = sorted(results.items(), key=lambda named: (_protocol(*named), named[1].get("epoch") or 0, named[0]))
    made = []
    for protocol, group in groupby(ordered, key=lambda named: _protocol(*named)):
        of_protocol = list(group)
        settings = [_settings(content) for _, content in of_protocol]
        keys = dict.fromkeys(key for each in settings for key in each)
        varying = [key for key in keys if len({json.dumps(each[key]) for each in settings if key in each}) > 1]
        for (_, content), own in zip(of_protocol, settings, strict=True):
            epoch = content.get("epoch")
            made.append(
                (
                    protocol,
                    "–" if epoch is None else f"{epoch:g}",
                    *(
                        percent(judged(content.get(key)), content.get("deviation", {}).get(key))
                        for key in ("accuracy", "top5")
                    ),
                    ", ".join(f"{key} {_value(key, own, content.get('file'))}" for key in varying),
                )
            )
    return made


def _odd(content: Mapping[str, Any]) -> str | None:
    """What keeps the content of a file from being shown as a result; None if nothing does."""
    if not isinstance(content["protocol"], str):
        return f"protocol = {shown(content['protocol'])} is no name"
    figures = {"epoch": content.get("epoch")}
    for key in ("accuracy", "top5"):
        figures[key] = judged(content.get(key))
    deviations = content.get("deviation", {})
    if not isinstance(deviations, dict):
        return f"deviation = {shown(deviations)} has no figures by name"
    figures |= {f"deviation.{key}": value for key, value in deviations.items()}
    bad = (key for key, value in figures.items() if not (value is None or _is_number(value)))
    return next((f"{key} = {shown(figures[key])} is no number" for key in bad), None)


def _is_number(value: Any) -> bool:
    """Whether a JSON value is a number that a float can hold."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _protocol(name: str, content: Mapping[str, Any]) -> str:
    """The protocol with what it trains: a linear protocol alone is called quick or paper."""
    return f"linear, {content['protocol']}" if name.startswith("linear") else str(content["protocol"])


def _settings(content: Mapping[str, Any]) -> dict[str, Any]:
    """Values by dotted key, without lists."""
    kept = {key: value for key, value in content.items() if key not in NO_SETTINGS}
    return {key: value for key, value in leaves(kept) if not isinstance(value, list | dict)}


def _value(key: str, settings: Mapping[str, Any], file: Any) -> str:
    """A setting of a result; weights that came from a file go by its name, too."""
    if key not in settings:
        return "–"
    value = _short(settings[key])
    return f"{Path(file).name} ({value})" if key == "weights" and isinstance(file, str) else value


def _short(value: Any) -> str:
    """A setting; of a digest the beginning."""
    is_digest = isinstance(value, str) and len(value) > DIGEST and set(value) <= set("0123456789abcdef")
    return value[:DIGEST] if is_digest else shown(value)
