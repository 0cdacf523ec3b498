"""`unigrad-fast evaluate list`: all results of an encoder in one table."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.table import Table

from unigrad_fast.evaluation.results import read_results
from unigrad_fast.runtime.console import fitted, new_console
from unigrad_fast.runtime.errors import UserError
from unigrad_fast.runtime.validation import leaves, shown

COLUMNS = ("protocol", "epoch", "top-1, %", "top-5, %", "what differs")
# Of a result: what has a column of its own, what is no setting, and what follows from others.
NO_SETTINGS = {
    "protocol", "epoch", "step", "accuracy", "top5", "deviation", "chosen", "counts", "versions", "data", "file",
    "images", "settings_of_fraction", "batch_norm",
}  # fmt: skip
DIGEST = 8  # characters that are shown of one
JUDGED = "trained encoder"  # among the features that one result compares


def show(folder: Path) -> None:
    """Print the results of a run, or those in a folder of results.

    Raises:
        UserError: there are none.
    """
    results = read_results(folder)
    if not results:
        raise UserError(f"{folder}: no results there; give the folder of a run that was evaluated, or of its results")
    table = Table(title=f"results in {folder}; comparable where protocol and what differs agree", title_justify="left")
    for column in COLUMNS:
        justify: Any = "right" if column.endswith("%") else "left"
        table.add_column(column, justify=justify, overflow="fold", no_wrap=column != "what differs")
    for row in rows(results):
        table.add_row(*map(fitted, row))
    new_console(quiet=False).print(table)


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
                        _percent(content.get(key), content.get("deviation", {}).get(key))
                        for key in ("accuracy", "top5")
                    ),
                    ", ".join(f"{key} {_short(own[key]) if key in own else '–'}" for key in varying),
                )
            )
    return made


def _protocol(name: str, content: Mapping[str, Any]) -> str:
    """The protocol with what it trains: a linear protocol alone is called quick or paper."""
    return f"linear, {content['protocol']}" if name.startswith("linear") else str(content["protocol"])


def _settings(content: Mapping[str, Any]) -> dict[str, Any]:
    """Values by dotted key, without lists."""
    kept = {key: value for key, value in content.items() if key not in NO_SETTINGS}
    return {key: value for key, value in leaves(kept) if not isinstance(value, list | dict)}


def _percent(value: Any, deviation: float | None) -> str:
    value = value.get(JUDGED) if isinstance(value, dict) else value
    if value is None:
        return "–"
    return f"{value:.2f}" + ("" if deviation is None else f" ± {deviation:.2f}")


def _short(value: Any) -> str:
    """A setting; of a digest the beginning."""
    is_digest = isinstance(value, str) and len(value) > DIGEST and set(value) <= set("0123456789abcdef")
    return value[:DIGEST] if is_digest else shown(value)
