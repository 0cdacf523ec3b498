"""Reads RUN/metrics.jsonl, even if a crash or another program damaged it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from unigrad_fast.runtime.run_folder import RunFolder

# Fields that readers rely on, besides the step and the epoch.
NUMBERS = {"knn": ("accuracy", "k", "temperature")}
TEXTS = {"knn": ("protocol", "branch"), "warning": ("message",)}
SHOWN = 60  # characters of a broken line


def read_lines(path: Path) -> tuple[list[tuple[bytes, dict[str, Any]]], str | None]:
    """The events of a metrics.jsonl in order, each after its line as in the file, without the line break.

    Also a message about lines that are not events and were ignored; None if there are none. A half-written last line,
    as a killed process leaves it, is ignored silently.
    """
    whole: list[tuple[bytes, dict[str, Any]]] = []
    broken: list[tuple[int, bytes]] = []
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        event = _event(line)
        if event is not None:
            whole.append((line, event))
        elif line.strip() and number < len(lines):
            broken.append((number, line))
    return whole, _complaint(path, broken) if broken else None


def read_events(run_dir: Path | str) -> list[dict[str, Any]]:
    """The events of RUN/metrics.jsonl in order; lines that are not events are skipped."""
    whole, _ = read_lines(RunFolder(Path(run_dir)).metrics)
    return [event for _, event in whole]


def _complaint(path: Path, broken: list[tuple[int, bytes]]) -> str:
    number, line = broken[0]
    shown = line[:SHOWN].decode("utf-8", "backslashreplace") + "..." * (len(line) > SHOWN)
    which = (
        f"line {number} is not an event" if len(broken) == 1 else f"{len(broken)} lines are not events, first {number}"
    )
    return f"{path}: {which}: {shown}; ignored"


def _event(line: bytes) -> dict[str, Any] | None:
    """The event in a line; None if a run would not write such a line."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError
        return None
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        return None
    kind = event["event"]
    numbers = [event.get(key) for key in ("step", "epoch", *NUMBERS.get(kind, ()))]
    if kind == "train":  # all other values are numbers too, null if not finite
        numbers += [value for key, value in event.items() if key != "event" and value is not None]
    texts = [event.get(key) for key in TEXTS.get(kind, ())]
    return event if all(map(_is_number, numbers)) and all(isinstance(text, str) for text in texts) else None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
